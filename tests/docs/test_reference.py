"""`docs/reference.md` has every field of `FSDPOptions` and every public name once."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import fsdp_compile
from fsdp_compile import FSDPOptions

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_has_every_option_with_its_default() -> None:
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\| `([^`]*)` \|$", page, flags=re.MULTILINE)
    options = FSDPOptions()
    expected: list[tuple[str, Any]] = [
        (field.name, getattr(options, field.name)) for field in dataclasses.fields(options)
    ]
    assert sorted(rows) == sorted((name, repr(value).replace("'", '"')) for name, value in expected)


def test_the_reference_has_every_public_name() -> None:
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: fsdp_compile\.(\w+)$", page, flags=re.MULTILINE)) == sorted(fsdp_compile.__all__)


def test_each_public_name_has_a_link_to_an_example_that_uses_it() -> None:
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    linked = re.findall(
        r"^::: fsdp_compile\.(\w+)\n\nExample: \[[^\]]*\]\(([^)#]*)[^)]*\)\.$", page, flags=re.MULTILINE
    )
    assert sorted(name for name, _ in linked) == sorted(fsdp_compile.__all__)
    unused = [
        (name, target)
        for name, target in linked
        if not re.search(rf"\b{name}\b", (DOCS / target).read_text(encoding="utf-8"))
    ]
    assert unused == []
