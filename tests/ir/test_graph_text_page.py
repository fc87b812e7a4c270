"""docs/graph_text.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_compile.cli.main import main
from fsdp_compile.ir.text.parser import parse_graph
from fsdp_compile.ir.text.printer import format_graph
from fsdp_compile.ir.text.spelling import DTYPES, OPERATORS

PAGE = (Path(__file__).parents[2] / "docs/graph_text.md").read_text(encoding="utf-8")


GOLDEN = Path(__file__).parents[1] / "golden"
BLOCKS = PAGE.split("```\n")[1::2]


def test_its_example_is_what_opt_reads_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = [block for block in BLOCKS if block.startswith("graph forward")]
    assert [format_graph(parse_graph(text)) for text in (before, after)] == [before, after]
    file = tmp_path / "graph.txt"
    file.write_text(before)
    assert main(["opt", "--verify", "final", str(file)]) == 0
    assert capsys.readouterr().out == after


def test_its_golden_case_is_one() -> None:
    (block,) = [block for block in BLOCKS if block.startswith("# why")]
    shortened = re.compile(re.escape(block).replace(re.escape("...\n"), "(?s:.+)"))
    assert [path.parent.name for path in GOLDEN.glob("*/*") if shortened.fullmatch(path.read_text("utf-8"))] != []


def test_it_names_every_short_name() -> None:
    assert [name for name in OPERATORS.values() if f"`{name}`" not in PAGE] == []
    assert f"`{' '.join(DTYPES.values())}`" in PAGE
