"""Graphs and plans as text, which reads back."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch import fx

from fsdp_compile.cli.main import main
from fsdp_compile.ir import source_line as module
from fsdp_compile.ir.graph import Phase, Record, Role
from fsdp_compile.ir.source_line import Frame, frames_of, source_line
from fsdp_compile.ir.text.parser import parse_graph
from fsdp_compile.ir.text.printer import DTYPES, OPERATORS, format_diff, format_graph, format_plan
from fsdp_compile.layout.spec import UnshardSpec

PAGE = (Path(__file__).parents[2] / "docs/invariants.md").read_text(encoding="utf-8")


GOLDEN = Path(__file__).parents[1] / "golden"
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


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
    (named,) = re.findall(r"\*\*Dtypes\*\* have torch's short names \(`(.*)`\); booleans are `bool`", PAGE)
    assert {*named.split(), "bool"} <= {*DTYPES.values()}


SPEC = UnshardSpec(
    offset=0, extent=32, shape=(6, 5), dim=0, size=2, group="g", param_dtype=torch.bfloat16, reduce_dtype=torch.float32
)


@dataclasses.dataclass(frozen=True)
class Move:
    node: fx.Node
    anchors: tuple[fx.Node, ...]
    record: Record


@dataclasses.dataclass(frozen=True)
class Plan:
    moves: tuple[Move, ...]
    skipped: tuple[tuple[fx.Node, str], ...]
    budget_bytes: int
    role: Role
    best: Move
    place: UnshardSpec


def test_shows_nodes_by_name_and_nests_what_has_parts() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    record = Record(Role.GATHER, "layers.0", ("layers.0.weight", "bias"), (SPEC, SPEC), Phase.FORWARD)
    move = Move(a, (a, b), record)
    assert format_plan(Plan((move, move), ((b, "first in line"),), 64, Role.GATHER, move, SPEC)) == (
        f"""\
Plan: skipped=[[%b, first in line]], budget_bytes=64, role=gather, place=({SPEC.text})
  moves
    Move: node=%a, anchors=[%a, %b], record=layers.0[.weight, bias]
    Move: node=%a, anchors=[%a, %b], record=layers.0[.weight, bias]
  best
    Move: node=%a, anchors=[%a, %b], record=layers.0[.weight, bias]
"""
    )


_TORCHS = f"{torch.__path__[0]}/nn/functional.py"
_OURS = module.__file__
_STACK = f"""
  File "/home/me/model.py", line 7, in forward
    return self.act(x)
           ^^^^^^^^^^^
  File "{_TORCHS}", line 9, in relu
    return torch.relu(input)
  File "/home/me/act.py", line 3, in <lambda>
  File "{_OURS}", line 11, in read
    return gather(module)
"""


def _node(stack: str | None) -> fx.Node:
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = stack
    return node


def test_frames_are_read_with_their_code_if_there_is_any() -> None:
    assert frames_of(_node(_STACK)) == [
        Frame("/home/me/model.py", 7, "forward", "return self.act(x)"),
        Frame(_TORCHS, 9, "relu", "return torch.relu(input)"),
        Frame("/home/me/act.py", 3, "<lambda>", ""),
        Frame(_OURS, 11, "read", "return gather(module)"),
    ]


@pytest.mark.parametrize(
    ("that_calls", "line"),
    [
        (None, 'File "/home/me/act.py", line 3, in <lambda>: '),
        (_TORCHS, 'File "/home/me/model.py", line 7, in forward: return self.act(x)'),
    ],
)
def test_the_innermost_line_of_the_user_counts(that_calls: str | None, line: str) -> None:
    assert source_line(_node(_STACK), that_calls=that_calls) == line


def test_torchs_line_is_better_than_none() -> None:
    node = _node(f'File "{_TORCHS}", line 9, in relu\n    return torch.relu(input)')
    assert source_line(node) == f'File "{_TORCHS}", line 9, in relu: return torch.relu(input)'


@pytest.mark.parametrize("stack", [None, ""])
def test_a_node_that_serves_no_line_says_so(stack: str | None) -> None:
    assert source_line(_node(stack)) == "no line of the user's program"


BEFORE = """\
graph forward on cpu
%x = input() : f32[2]
%a = aten.relu(%x) : f32[2]
%b = aten.neg(%a) : f32[2]
return (%b,)
"""
AFTER = BEFORE.replace("%b = aten.neg(%a)", "%c = aten.abs(%a) : f32[2]\n%b = aten.neg(%c)")


def test_a_diff_shows_the_lines_that_changed() -> None:
    assert format_diff(BEFORE, BEFORE) == ""
    assert format_diff(BEFORE, AFTER).splitlines()[3:] == [
        "-%b = aten.neg(%a) : f32[2]",
        "+%c = aten.abs(%a) : f32[2]",
        "+%b = aten.neg(%c) : f32[2]",
    ]
