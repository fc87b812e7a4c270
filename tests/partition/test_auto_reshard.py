"""`reshard_after_forward="auto"`: the numbers of one process, fewer gathers, and no more memory than was promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_compile import ConfigError, FSDPOptions, explain, fully_shard
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.cost.memory import Holder
from fsdp_compile.explain.plan import Plan
from tests import long
from tests.fake_world import fake_world
from tests.models.kinds import KINDS, StackOfThree
from tests.models.round_sizes import WIDTH, Broken, on_meta
from tests.models.round_sizes import Stack as Blocks
from tests.numerics.one_process.measure import Differences, assert_equal_training, train_pair
from tests.partition.test_partition import sent
from tests.ranks import run_ranks
from tests.two_sides import mesh_of

SLOW = hardware("cpu", 0.01)
OPEN: dict[str, Any] = {"reshard_after_forward": "auto", "hardware": SLOW}
TRAINED = ("stack", "tied", "graph-breaks", "checkpointed", "repeated", "frozen", "odd-shapes")


def _shard_over_replicas(model: torch.nn.Module) -> None:
    fully_shard(model, mesh=mesh_of((2, 1)), reshard_after_forward="auto")


def _trained(name: str, lower: str, *, replicas: bool) -> Differences:
    prepare, options = (_shard_over_replicas, {"hardware": SLOW}) if replicas else (None, OPEN)
    return train_pair(KINDS[name], lower=lower, prepare=prepare, clip=0.5, options=options)


@long.parametrize("name", TRAINED, always=["tied"])
def test_training_equals_one_process(name: str) -> None:
    assert_equal_training(run_ranks(_trained, name, "eager", replicas=False))


@pytest.mark.core
@pytest.mark.long
@pytest.mark.parametrize(("lower", "replicas"), [("inductor", False), ("eager", True)], ids=["inductor", "replicas"])
def test_training_in_other_ways_equals_one_process(lower: str, *, replicas: bool) -> None:
    assert_equal_training(run_ranks(_trained, "stack", lower, replicas=replicas))


@pytest.mark.long
def test_backward_gathers_all_but_what_forward_used_last() -> None:
    everything = ["head", "blocks.2", "blocks.1", "blocks.0"]
    with fake_world(2):
        kept = sent(StackOfThree, **OPEN)
        fixed = sent(StackOfThree, reshard_after_forward="auto", prefetch=1)
    assert list(dict.fromkeys(kept["backward gathers"])) == everything[2:]
    assert list(dict.fromkeys(kept["backward reduces"])) == everything
    assert fixed["backward gathers"] == everything, "with a fixed distance nothing is planned"


class Deep(Blocks):
    def __init__(self) -> None:
        super().__init__(8)


def _plan(gb_per_s: float = 0.1, **options: Any) -> Plan:
    model, x = on_meta(Deep)
    return explain(model, x, world_size=8, options={"lower": "eager", **options}, hardware=hardware(link=gb_per_s))


def _unsharded_bytes(plan: Plan) -> list[int]:
    return [max(graph.memory.live_bytes[Holder.UNSHARDED]) for graph in plan.graphs]


def _gathers(plan: Plan) -> int:
    return len({unit for c in plan.backward[0].collectives if c.kind is Kind.GATHER for unit in c.units})


@pytest.mark.long
def test_what_is_kept_is_within_what_the_schedule_may_hold() -> None:
    freed, kept = _plan(), _plan(reshard_after_forward="auto")
    assert _gathers(kept) < _gathers(freed) == 8
    assert kept.step_us < freed.step_us
    copied = 2 * 2 * 2 * WIDTH  # small parameters are copied out of the message that they share
    for now, before in zip(_unsharded_bytes(kept), _unsharded_bytes(freed), strict=True):
        assert now <= before + copied
    assert any("there is room" in skipped.why for skipped in kept.skipped)


@pytest.mark.long
def test_a_larger_budget_keeps_more_and_is_kept() -> None:
    budget_gb = (_plan().peak_bytes + 4 * WIDTH * WIDTH) / 1e9
    little = _plan(reshard_after_forward="auto", memory_budget_gb=budget_gb)
    much = _plan(reshard_after_forward="auto", memory_budget_gb=1.0)
    assert 0 == _gathers(much) < _gathers(little) < 8
    assert little.peak_bytes <= budget_gb * 1e9
    assert much.step_us < little.step_us


@pytest.mark.long
def test_a_plan_for_another_link_chooses_anew() -> None:
    slow = _plan(reshard_after_forward="auto")
    fast = slow.at(gb_per_s=1e6)
    assert fast == _plan(1e6, reshard_after_forward="auto")
    assert fast.at(gb_per_s=0.1) == slow


def test_a_model_with_graph_breaks_keeps_nothing() -> None:
    """Each of several graphs would hold what was promised for all."""
    model, x = on_meta(Broken)
    options = {"lower": "eager", "reshard_after_forward": "auto"}
    plan = explain(model, x, world_size=8, options=options, hardware=hardware(link=0.1))
    assert all(c.reshard is not None for graph in plan.graphs for c in graph.collectives if c.kind is Kind.GATHER)


def test_wrong_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="reshard_after_forward='always'"):
        fully_shard(torch.nn.Linear(2, 2), reshard_after_forward="always")  # type: ignore[arg-type]
    assert FSDPOptions(reshard_after_forward="auto").sharding == {"reshard_after_forward": "auto"}
