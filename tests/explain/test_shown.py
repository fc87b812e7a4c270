"""How a plan is shown: text, page, data."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fsdp_compile.explain.plan import Plan
from fsdp_compile.explain.tables import page, page_data
from tests.models.round_sizes import explained


@pytest.fixture(scope="module")
def plan() -> Plan:
    return explained(world_size=64)


def test_text_fits_80_columns_and_has_no_escapes(plan: Plan) -> None:
    text = str(plan)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    shown = ("blocks.0", "gather", "reduce", "peak", "skipped", "exposed")
    first = ("compute or link", "sent per rank", "FSDP2 would send")
    assert [word for word in (*shown, *first) if word not in text] == []
    assert "blocks.0..2 (3)" in text.split("forward:", maxsplit=1)[0]  # layers that are alike share a row
    assert "b_p" not in text  # no symbols of formulas


def test_data_survives_json_and_has_units_in_its_names(plan: Plan) -> None:
    data = plan.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["graphs"][0]["collectives"][0]["kind"] == "all-gather"
    numbers = {key for key in _keys(data) if re.search(r"time|peak_b|sent|floor|step|end|begin", key)}
    assert all(re.search(r"_us$|_bytes$|^sent$|sent_bytes", key) for key in numbers), numbers


def _keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in _keys(item)}
    return {key for item in value for key in _keys(item)} if isinstance(value, list) else set()


def test_the_page_loads_nothing_and_holds_its_data(plan: Plan, tmp_path: Path) -> None:
    text = plan.save_html(tmp_path / "plan.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|<link|\bsrc=|@import|url\(\s*['\"]?(?!#)", text)
    assert "<!--" not in text
    embedded = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert embedded is not None
    assert json.loads(embedded[1]) == json.loads(json.dumps(page_data(plan)))


def test_names_cannot_break_out_of_the_page(plan: Plan) -> None:
    text = page(dataclasses.replace(plan, title="</script><script>alert(1)</script>"))
    assert "<script>alert" not in text


def test_the_page_draws_every_peak(plan: Plan) -> None:
    data = page_data(plan)
    for drawn, graph in zip(data["graphs"], plan.graphs, strict=True):
        curve = drawn["memory"]["curve"]
        assert max(sum(point["bytes"].values()) for point in curve) == graph.memory.peak_bytes
        assert len(curve) <= 901
    assert data["graphs"][1]["offset_us"] == plan.graphs[0].end_us
