"""Plans as text."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from fsdp_compile.ir.graph import Phase, Record, Role
from fsdp_compile.ir.text.printer import format_plan
from fsdp_compile.layout.spec import UnshardSpec

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
