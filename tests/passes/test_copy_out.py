"""What units in one message have alike is copied out of it at once, and everything else by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import fx, nn

from fsdp_compile.ir.graph import Role, StepGraph, require
from tests.verify.captured import World, capture

aten = torch.ops.aten


class _Layer(nn.Module):
    """Two matrices with a bias between them, which backward does not gather, and a scale."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.scale


def _stack(*hidden: int, width: int = 8) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(_Layer(width, each) for each in hidden))


def _units(hidden: Iterable[int]) -> tuple[str, ...]:
    return tuple(str(number) for number, _ in enumerate(hidden))


def _copies(step: StepGraph) -> list[tuple[str, ...]]:
    """The parameters that each copy of several units' is of, in the graph's order."""
    clones = [node for node in step.nodes(Role.COPY_OUT) if node.target is aten.clone.default]
    return [require(node).parameters for node in clones if len(require(node).units) > 1]


def _captured(*hidden: int, width: int = 8) -> list[StepGraph]:
    world = World(2, units=_units(hidden))
    return capture(_stack(*hidden, width=width), [torch.ones(3, width)], world, bucket_mb=1)


def _named(step: StepGraph, suffix: str) -> list[fx.Node]:
    return [node for node in step.nodes(Role.FULL) if require(node).parameters[0].endswith(suffix)]


@pytest.mark.core
def test_units_that_are_alike_are_copied_together() -> None:
    forward, backward = _captured(6, 6, 6)
    of_each = {"up.weight", "up.bias", "down.weight", "scale"}
    assert sorted(_copies(forward)) == sorted((f"0.{n}", f"1.{n}", f"2.{n}") for n in of_each)
    read_again = {"up.weight", "down.weight", "scale"}  # of the first unit only two: its input needs no gradient
    assert sorted(sorted(copy) for copy in _copies(backward)) == sorted([f"1.{n}", f"2.{n}"] for n in read_again)
    for full in forward.nodes(Role.FULL):
        assert full.target is aten.view.default, "the parameter is a part of the copy"
        assert full.all_input_nodes[0].target is aten.slice.Tensor


def test_units_with_others_between_them_are_not_alike() -> None:
    forward, _ = _captured(6, 6, 4, 6)
    assert {frozenset(name[0] for name in copy) for copy in _copies(forward)} == {frozenset("01")}
    assert {full.all_input_nodes[0].target for full in _named(forward, "up.weight")} == {
        aten.slice.Tensor,
        aten.clone.default,
    }


def test_parameters_with_padding_between_ranks_are_copied_alone() -> None:
    forward, _ = _captured(5, 5)
    assert _copies(forward) == [], "hidden rows do not divide by two ranks"


def test_copies_stand_where_the_first_unit_reads() -> None:
    forward, _ = _captured(6, 6, 6)
    order = forward.order()
    copies = {require(n).parameters[0]: n for n in forward.nodes(Role.COPY_OUT) if n.target is aten.clone.default}
    for name, copy in copies.items():
        (full,) = [node for node in forward.nodes(Role.FULL) if require(node).parameters == (name,)]
        reads = [order[user] for user in full.users]
        between = [node for node in order if order[copy] < order[node] < min(reads)]
        assert all(node.target in (aten.view.default, aten.slice.Tensor) or "fsdp" in node.meta for node in between)
