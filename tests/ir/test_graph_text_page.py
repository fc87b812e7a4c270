"""docs/graph_text.md says what the code does."""

from __future__ import annotations

from pathlib import Path

from fsdp_compile.ir.text.names import DTYPES, OPERATORS
from fsdp_compile.ir.text.parser import parse_graph
from fsdp_compile.ir.text.printer import format_graph

PAGE = (Path(__file__).parents[2] / "docs/graph_text.md").read_text(encoding="utf-8")


def test_its_example_is_canonical() -> None:
    example = PAGE.split("```\n")[1]
    assert format_graph(parse_graph(example)) == example


def test_it_names_every_short_name() -> None:
    assert [name for name in OPERATORS.values() if f"`{name}`" not in PAGE] == []
    assert f"`{' '.join(DTYPES.values())}`" in PAGE
