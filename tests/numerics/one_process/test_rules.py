"""FSDP1's rules by name: where gathers start, how many units are held, and the numbers of one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch.distributed.fsdp import BackwardPrefetch

from fsdp_compile import ConfigError, FSDPOptions, FSDPPrefetch
from fsdp_compile.config.prefetch import Ahead
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.explain.api import explain
from fsdp_compile.explain.report import Collective, GraphPlan
from fsdp_compile.passes.settings import PROMISES
from fsdp_compile.pipeline import passes
from fsdp_compile.verify.check import complaints
from fsdp_compile.verify.facts import Limits
from tests import long
from tests.models.graphs import MODELS
from tests.models.kinds import KINDS
from tests.models.round_sizes import Stack, on_meta
from tests.numerics.one_process.measure import train_pair
from tests.ranks import on_ranks
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
