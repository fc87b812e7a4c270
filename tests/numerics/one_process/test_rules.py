"""FSDP1's rules by name, and FSDP2's lists of modules to prefetch: where gathers start, and numbers of one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import BackwardPrefetch

from fsdp_compile import ConfigError, FSDPOptions, FSDPPrefetch, explain, fully_shard
from fsdp_compile.config.prefetch import Ahead
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.explain.report import Collective, GraphPlan
from fsdp_compile.passes.settings import PROMISES
from fsdp_compile.pipeline import passes
from fsdp_compile.verify.check import complaints
from fsdp_compile.verify.facts import Limits
from tests import long
from tests.delayed_copies import ON_SUCH_A_HOST, host_apart
from tests.models.graphs import MODELS
from tests.models.kinds import KINDS, WIDTH, StackOfThree
from tests.models.round_sizes import Stack, on_meta
from tests.numerics.one_process.measure import train_pair
from tests.ranks import on_ranks
from tests.two_sides import compile_eagerly, shard_blocks
from tests.verify.captured import World, capture

PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
WITHOUT_LIMIT = FSDPPrefetch(forward=True, limit_all_gathers=False)


TRAINED: dict[str, Any] = {
    "odd-shapes": POST,
    "stack": "none+forward_prefetch",
    "tied": "BACKWARD_PRE",
    "repeated": WITHOUT_LIMIT,
}


@pytest.mark.core
@long.parametrize("kind", TRAINED, always=["repeated"])
@on_ranks()
def test_no_rule_changes_a_number(kind: str) -> None:
    train_pair(KINDS[kind], options={"prefetch": TRAINED[kind]})


def _graphs(prefetch: object) -> tuple[GraphPlan, GraphPlan]:
    model, x = on_meta(Stack)
    forward, backward = explain(model, x, world_size=8, options={"lower": "eager", "prefetch": prefetch}).graphs
    return forward, backward


def _of(graph: GraphPlan, kind: Kind) -> list[Collective]:
    return [collective for collective in graph.collectives if collective.kind is kind]


def _index(place: Any) -> int:
    assert place is not None
    return place.index


def _assert_rule(graph: GraphPlan, rule: Ahead) -> None:
    gathers = _of(graph, Kind.GATHER)
    assert len(gathers) == 3
    reductions = {c.unit: c for c in _of(graph, Kind.REDUCE)}
    for i, (before, after) in enumerate(itertools.pairwise(gathers)):
        start, need = _index(after.start), _index(after.wait)
        messages = len(after.messages)
        match rule:
            case Ahead.AT_NEED:
                assert need - start == messages + 1
            case Ahead.BEFORE_COMPUTE:
                assert _index(before.start) < start < _index(before.wait)
                assert all(_index(earlier.wait) < start for earlier in gathers[:i]), "one gather is ahead, and not two"
            case Ahead.AFTER_COMPUTE:
                assert _index(before.reshard) < start < _index(reductions[before.unit].start)
                assert start < need
            case Ahead.AT_ONCE:
                assert start < _index(gathers[0].wait)


@pytest.mark.parametrize(
    ("prefetch", "forward", "backward"),
    [
        ("BACKWARD_PRE", Ahead.AT_NEED, Ahead.BEFORE_COMPUTE),
        (POST, Ahead.AT_NEED, Ahead.AFTER_COMPUTE),
        (FSDPPrefetch(backward=None, forward=True), Ahead.BEFORE_COMPUTE, Ahead.AT_NEED),
        (WITHOUT_LIMIT, Ahead.AT_ONCE, Ahead.AT_ONCE),
    ],
    ids=["pre", "post", "forward", "without-limit"],
)
def test_gathers_start_where_the_rule_says(prefetch: object, forward: Ahead, backward: Ahead) -> None:
    for graph, rule in zip(_graphs(prefetch), (forward, backward), strict=True):
        _assert_rule(graph, rule)


@pytest.mark.long
def test_each_rule_holds_what_it_promises_and_the_next_tighter_one_does_not() -> None:
    make, inputs = MODELS["stack"]
    tighter = {
        Ahead.AFTER_COMPUTE: None,
        Ahead.BEFORE_COMPUTE: Limits(prefetch=0),
        Ahead.AT_ONCE: Limits(prefetch=1),
    }
    for rules in (FSDPPrefetch(backward=POST), FSDPPrefetch(), WITHOUT_LIMIT):
        _, backward = capture(make, inputs(), World(2), prefetch=rules)
        assert complaints(backward, limits=PROMISES[rules.in_backward]) == []
        less = tighter[rules.in_backward]
        if less is not None:
            assert {c.rule for c in complaints(backward, limits=less)} == {"unsharded-bytes"}


@pytest.mark.long
def test_post_holds_one_unit_and_pre_holds_two() -> None:
    def most(prefetch: object) -> int:
        held = peak = 0
        gathers = _of(_graphs(prefetch)[1], Kind.GATHER)
        events = [(_index(g.start), g.size_bytes) for g in gathers]
        events += [(_index(g.reshard), -g.size_bytes) for g in gathers]
        for _, size_bytes in sorted(events):
            held += size_bytes
            peak = max(peak, held)
        return peak // gathers[0].size_bytes

    assert [most(rules) for rules in (POST, "none", PRE, WITHOUT_LIMIT)] == [1, 1, 2, 3]


def test_short_forms_stand_for_fsdp1s_arguments() -> None:
    read = {
        text: FSDPOptions(prefetch=text).prefetch for text in ("BACKWARD_PRE", "BACKWARD_POST+forward_prefetch", "none")
    }
    assert read["BACKWARD_PRE"] == FSDPOptions(prefetch=PRE).prefetch == FSDPPrefetch()
    assert read["BACKWARD_POST+forward_prefetch"] == FSDPPrefetch(backward=POST, forward=True)
    assert read["none"] == FSDPPrefetch(backward=None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"backward": "BACKWARD_PRE"}, "backward cannot be 'BACKWARD_PRE'"),
        ({"forward": 1}, "forward cannot be 1"),
        ({"limit_all_gathers": None}, "limit_all_gathers cannot be None"),
        ({"backward": POST, "limit_all_gathers": False}, "and none does"),
    ],
)
def test_wrong_rules_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FSDPPrefetch(**arguments)
    assert says in caught.value.what
    assert caught.value.instead


def test_by_default_a_schedule_is_planned() -> None:
    assert FSDPOptions().prefetch == "auto"
    names = [one.name for one in passes(FSDPOptions())]
    assert {"schedule-auto", "delay-weight-gradients"} <= set(names)
    assert "delay-weight-gradients" not in [one.name for one in passes(FSDPOptions(memory_budget_gb=1))]


# Lists of modules to prefetch, by FSDP2's methods.

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
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](x))
        torch._dynamo.graph_break()
        return self.head(self.blocks[2](x))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("make", "places", "options", "says"),
    [
        (StackOfThree, (1, 0), {}, "blocks.1 is told to prefetch blocks.0, which is needed before it"),
        (StackOfThree, (0, 1), {"prefetch": "auto", "memory_budget_gb": 1.0}, "only one can hold"),
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
