"""Step time and memory over ranks, out of one trace."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fsdp_compile.cli.main import main
from fsdp_compile.errors import ConfigError
from fsdp_compile.explain.plan import Plan
from fsdp_compile.explain.scaling import Scaling
from tests.models.round_sizes import explained

RANKS = [2, 16, 64]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return explained()


@pytest.fixture(scope="module")
def scaling(plan: Plan) -> Scaling:
    return plan.scaling(RANKS, gb_per_s=5.0)


def test_rows_are_the_plans_there(plan: Plan, scaling: Scaling) -> None:
    assert [row.world_size for row in scaling.rows] == RANKS
    for row in scaling.rows:
        assert row == plan.at(world_size=row.world_size, gb_per_s=5.0)
        assert row.step_us == pytest.approx(row.compute_us + row.exposed_us)
        assert 0 < row.efficiency <= 1
    shards = [row.shard_bytes for row in scaling.rows]
    assert shards == sorted(shards, reverse=True)
    shown = json.loads(json.dumps(scaling.to_dict()))["rows"]
    assert [row["world_size"] for row in shown] == RANKS
    assert [row["sent_bytes"] for row in shown] == [row.volume.total_bytes for row in scaling.rows]
    with pytest.raises(ConfigError, match="no number of ranks"):
        plan.scaling([])


@pytest.mark.optional
def test_it_is_drawn_with_one_tick_per_number_of_ranks(scaling: Scaling, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert scaling.save_png(tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    drawn = ElementTree.parse(scaling.save_svg(tmp_path / "scaling.svg"))
    comments = ElementTree.tostring(drawn.getroot(), encoding="unicode")
    assert comments.count("xtick_") >= 2 * len(RANKS)


@pytest.mark.optional
def test_the_command_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "scaling.svg"
    argv = f"explain tests.models.round_sizes:stack --lower eager --scaling {path} --world-sizes 2 8".split()
    assert main(argv) == 0
    assert "<svg" in path.read_text(encoding="utf-8")
    assert f"wrote {path}" in capsys.readouterr().err
    assert main([*argv, "--scaling", str(tmp_path / "scaling.gif")]) == 2
    assert "ends in .svg or .png" in capsys.readouterr().err


def test_without_matplotlib_the_command_to_install_it_is_named(
    scaling: Scaling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> object:
        return None if name == "matplotlib" else importlib.util.find_spec(name)

    for module in ("explain.figures", "cli.explain"):  # by name: `explain` is a function, too
        monkeypatch.setattr(importlib.import_module(f"fsdp_compile.{module}"), "find_spec", missing)
    with pytest.raises(ConfigError, match=r"pip install 'fsdp-compile\[plot\]'"):
        scaling.save_png(tmp_path / "scaling.png")
    assert main(["explain", "--scaling", str(tmp_path / "scaling.png")]) == 2  # before anything is traced
    assert "pip install 'fsdp-compile[plot]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
