"""Lists of modules to prefetch, with FSDP2's methods: numbers of one process, gathers where the lists say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from fsdp_compile import ConfigError, explain, fully_shard
from fsdp_compile.cost.communicate import Kind
from tests import long
from tests.delayed_copies import ON_SUCH_A_HOST, host_apart
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Stack, StackOfThree
from tests.numerics.one_process.measure import train_pair
from tests.ranks import on_ranks
from tests.two_sides import compile_eagerly, shard_blocks

Starts = list[tuple[str, int, int]]
"""Unit, position of the start of its gather, position of its wait, in the order of the starts."""


def _starts(model: nn.Module) -> tuple[Starts, Starts]:
    forward, backward = (
        [
            (c.unit, c.start.index, c.wait.index)
            for c in graph.collectives
            if c.kind is Kind.GATHER and c.wait is not None
        ]
        for graph in explain(model).graphs
    )
    return forward, backward


def _names(starts: Starts) -> list[str]:
    return [unit for unit, _, _ in starts]


def _between_wait_and_wait(starts: Starts, unit: str, by: str) -> bool:
    """Whether a gather starts after the wait for `by` and before the next wait of any gather."""
    found = {name: (start, wait) for name, start, wait in starts}
    after = found[by][1]
    nexts = [wait for _, _, wait in starts if wait > after]
    return after < found[unit][0] < min(nexts)


@pytest.mark.core
@long.parametrize("prefetch", ["auto", 0, "BACKWARD_POST"], always=["auto"])
@on_ranks()
def test_named_units_start_where_the_module_that_names_them_is_used_however_others_are_scheduled(
    prefetch: object,
) -> None:
    models: list[Any] = []

    def prepare(model: Any) -> None:
        models.append(shard_blocks(model))
        first, second, third = model.blocks
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])

    train_pair(StackOfThree, prepare=prepare, options={"prefetch": prefetch})
    forward, backward = _starts(models[0])
    for starts, by, named in (
        (forward, "blocks.0", ["blocks.1", "blocks.2"]),
        (backward, "blocks.2", ["blocks.1", "blocks.0"]),
    ):
        assert [unit for unit in _names(starts) if unit in named] == named
        assert all(_between_wait_and_wait(starts, unit, by) for unit in named)


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def _step(model: nn.Module, **options: Any) -> nn.Module:
    compile_eagerly(model, **{"prefetch": 0, **options})(torch.ones(4, WIDTH)).sum().backward()
    return model


@pytest.mark.usefixtures("world")
def test_a_list_may_overtake_and_can_be_taken_back() -> None:
    model = shard_blocks(StackOfThree())
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
    assert _names(_starts(_step(model))[0]) == ["blocks.0", "blocks.2", "blocks.1", "(root)"]
    model.blocks[0].set_modules_to_forward_prefetch([])
    assert _names(_starts(_step(model))[0]) == ["blocks.0", "blocks.1", "blocks.2", "(root)"]


@pytest.mark.usefixtures("world")
def test_a_list_may_name_a_unit_that_shares_the_gather_of_one_before() -> None:
    model: Any = StackOfThree()
    first, offloaded, third = model.blocks
    fully_shard(first)
    fully_shard(offloaded, offload_policy=ON_SUCH_A_HOST)
    fully_shard(third)
    fully_shard(model)
    offloaded.set_modules_to_forward_prefetch([third])
    offloaded.set_modules_to_backward_prefetch([first])
    with host_apart():
        forward, backward = _starts(_step(model, bucket_mb=1))
    assert (_names(forward)[:2], _names(backward)) == (
        ["blocks.0, blocks.2", "blocks.1"],
        ["blocks.2, blocks.0", "blocks.1"],
    )


class _Broken(StackOfThree):
    """Two blocks in one graph, and one in the next."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](x))
        torch._dynamo.graph_break()
        return self.head(self.blocks[2](x))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("make", "places", "options", "says"),
    [
        (Stack, (1, 0), {}, "blocks.1 is told to prefetch blocks.0, which is needed before it"),
        (Stack, (0, 1), {"prefetch": "auto", "memory_budget_gb": 1.0}, "only one can hold"),
        (_Broken, (1, 2), {}, "blocks.2, which its graph does not read"),
    ],
    ids=["needed-before", "budget", "graph-break"],
)
def test_lists_that_cannot_be_followed_are_refused(
    make: Callable[[], nn.Module], places: tuple[int, int], options: dict[str, Any], says: str
) -> None:
    model = shard_blocks(make())
    first, named = (model.blocks[place] for place in places)
    first.set_modules_to_forward_prefetch([named])
    with pytest.raises((BackendCompilerFailed, ConfigError), match=r"told to prefetch|only one can hold") as caught:
        _step(model, **options)
    assert says in str(caught.value)
