"""Gradients that wait: microbatches equal one process on all the data, and FSDP2 bit by bit; nothing is lost.

Together with all that changes what is sent: low precision, hooks, 8 bits, planned schedules.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, MixedPrecision, fully_shard, no_sync, register_comm_hook, units
from fsdp_compile.ir.graph import Role
from fsdp_compile.lower.region import regions_of
from tests import long
from tests.models.kinds import GraphBreaks, Slim, Stack
from tests.numerics.one_process.measure import OneOfTwo, batches, gradient_difference
from tests.ranks import on_ranks
from tests.two_sides import (
    Averaging,
    Run,
    WithFsdp2,
    WithOneProcess,
    compare_gradients,
    compile_eagerly,
    loss_of,
    mesh_of,
    sgd,
    share,
    unique_graphs,
)

CLOSE = 1e-5
HALF = MixedPrecisionPolicy(torch.float16, torch.float16)


def make_pair(
    make: Callable[[], nn.Module] = lambda: Slim(1),
    how: Run = Run.SHARDED,
    *,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> WithOneProcess:
    torch._dynamo.reset()  # pairs share the code of a forward, of which Dynamo keeps eight graphs
    shard = functools.partial(fully_shard, **arguments)
    return WithOneProcess(make, how, shard, optimizer=sgd, shape=32, rows=4, twice=False, **(options or {}))


def hold(pair: WithOneProcess) -> None:
    with no_sync(pair.call):
        pair.backward()


def is_close(pair: WithOneProcess) -> bool:
    return gradient_difference(*pair) < CLOSE


def gradients_are_none(model: nn.Module) -> bool:
    return all(p.grad is None for p in model.parameters())


@pytest.mark.core
@long.parametrize("reshard", [True, False], always=[False])
@on_ranks()
def test_gradients_wait_for_the_next_backward_that_reduces(*, reshard: bool) -> None:
    pair = make_pair(Slim, reshard_after_forward=reshard)
    for step in range(2):
        compiled = unique_graphs()
        hold(pair)
        hold(pair)
        assert gradients_are_none(pair.model)
        pair.backward()
        assert is_close(pair)
        pair.update()
        assert step == 0 or unique_graphs() == compiled


class ReadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,oi->bo", x + x @ self.weight, self.weight).tanh()


CASES: dict[str, Callable[[], WithOneProcess]] = {
    "open sizes, of which gradients are none": lambda: make_pair(ReadTwice, options={"dynamic": True}),
    "a plain model, which is sharded inside by its first call": lambda: make_pair(Slim, Run.PLAIN),
    "graph breaks": lambda: make_pair(GraphBreaks),
    # Unreduced gradients and kept parameters are inputs of kernels.
    "through Inductor": lambda: make_pair(Slim, options={"lower": "inductor"}, reshard_after_forward=False),
}
*EAGER, THROUGH_INDUCTOR = CASES


@pytest.mark.long
@pytest.mark.parametrize("name", [*EAGER, pytest.param(THROUGH_INDUCTOR, marks=pytest.mark.inductor)])
@on_ranks(timeout_s=500)
def test_two_steps_of_two_microbatches(name: str) -> None:
    pair = CASES[name]()
    for _ in range(2):
        hold(pair)
        assert gradients_are_none(pair.model)
        pair.backward()
        assert gradient_difference(*pair) < (10 * CLOSE if name == THROUGH_INDUCTOR else CLOSE)
        pair.update()


@pytest.mark.long
@on_ranks()
def test_no_sync_leaves_gradients_as_they_were() -> None:
    pair = make_pair()
    pair.backward()
    before = [p.grad.to_local().clone() for p in pair.model.parameters() if isinstance(p.grad, DTensor)]
    hold(pair)
    after = [p.grad.to_local() for p in pair.model.parameters() if isinstance(p.grad, DTensor)]
    assert len(before) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    pair.backward()
    assert is_close(pair)


@pytest.mark.core
@on_ranks()
def test_nothing_is_lost_and_nothing_counts_twice() -> None:
    """One model through every odd order of forward, backward and flags; the difference after each."""
    pair = make_pair(Slim, reshard_after_forward=True)
    found: dict[str, float] = {}

    def finish(name: str) -> None:
        found[name] = gradient_difference(*pair)
        pair.update()

    hold(pair)  # first, since torch decides whether a graph can be kept when its backward is compiled
    for loss in pair.losses():
        loss.backward(retain_graph=True)
        loss.backward()
    finish("two backwards through one graph")

    hold(pair)
    pair.call(pair.next_batch()[0])  # the loss is thrown away: what it borrowed stays
    pair.backward()
    finish("forward thrown away")

    hold(pair)
    for first, second in zip(pair.losses(), pair.losses(), strict=True):
        (first + second).backward()
    finish("two forwards before one backward")

    with no_sync(pair.call):
        mine, theirs = pair.losses()
    mine.backward()  # its forward has decided
    assert gradients_are_none(pair.model)
    theirs.backward()
    pair.backward()
    finish("forward inside, backward outside")

    hold(pair)
    mine, theirs = pair.losses()
    hold(pair)  # while the first ones are borrowed
    mine.backward()
    theirs.backward()
    finish("held while borrowed")

    hold(pair)
    x = pair.next_batch()[0].clone().requires_grad_()
    torch.autograd.grad(loss_of(pair.call(x)), [x])  # makes gradients that are never accumulated
    pair.backward()
    finish("gradients of inputs alone")

    hold(pair)
    pair.model.zero_grad()  # as with FSDP2, what is held stays
    pair.backward()
    finish("zero_grad between")

    with contextlib.suppress(AttributeError), no_sync(pair.call):
        pair.model.get_parameter("nothing")
    pair.backward()
    finish("exception inside")
    assert len(found) == 8
    assert {name: value for name, value in found.items() if not value < CLOSE} == {}


class Branching(OneOfTwo):
    """In the unit of a head, which each microbatch uses."""

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(x))


@long.parametrize("held", [True, False], always=[False])
@on_ranks()
def test_a_parameter_that_the_last_microbatch_does_not_use_gets_what_was_held(*, held: bool) -> None:
    """And its gradient stays where it was reduced before."""
    pair = make_pair(Branching, reshard_after_forward=True)
    (hold if held else WithOneProcess.backward)(pair)
    pair.change(lambda model: setattr(model, "chosen", "second"))
    pair.backward()
    assert is_close(pair)


def test_what_is_no_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="not a"), no_sync(3):  # type: ignore[arg-type]
        pass


# Beside FSDP2.


def _beside_fsdp2(make: Callable[[], nn.Module], factor: float | None = None, **arguments: Any) -> WithFsdp2:
    def shard(model: Any, fully_shard: Any = fsdp2) -> None:
        for part in (model.blocks[0], model):
            fully_shard(part, **arguments)
            if arguments.get("mp_policy") is not HALF:
                part.set_force_sum_reduction_for_comms(True)  # gloo cannot divide for FSDP2
            if factor is not None:
                part.set_gradient_divide_factor(factor)

    def batch(step: int) -> torch.Tensor:
        return share(batches(1, 4 * dist.get_world_size(), seed=step)[0])

    pair = WithFsdp2(make, shard, batch, ours=lambda model: shard(model, fully_shard))
    pair.compiled(fullgraph=False)
    return pair


SETTINGS: dict[str, tuple[tuple[int, ...], MixedPrecisionPolicy, float | None]] = {
    "a divide factor": ((2,), MixedPrecisionPolicy(), 3.0),
    "hybrid": ((2, 2), MixedPrecisionPolicy(), None),
    "hybrid, bf16": ((2, 2), MixedPrecisionPolicy(torch.bfloat16, torch.float32), None),
    "hybrid, fp16": ((2, 2), HALF, None),
}


@pytest.mark.core
@long.parametrize("name", SETTINGS, always=["a divide factor"])
@on_ranks(world_size=lambda name: torch.Size(SETTINGS[name][0]).numel())
def test_settings_of_fsdp2_give_its_gradients_bit_by_bit(name: str) -> None:
    shape, policy, factor = SETTINGS[name]
    make = Slim if policy == MixedPrecisionPolicy() else Stack
    pair = _beside_fsdp2(lambda: make(1), factor, mesh=mesh_of(shape), mp_policy=policy)
    pair.change(lambda model: model.set_requires_gradient_sync(False))
    pair.backward()
    pair.change(lambda model: model.set_requires_gradient_sync(True))
    if len(shape) > 1:
        pair.change(lambda model: model.set_requires_all_reduce(False))
        pair.backward()
        pair.change(lambda model: model.set_requires_all_reduce(True))
    pair.backward()
    pair.compare_gradients()


@on_ranks()
def test_each_backward_hands_gradients_over_as_fsdp2_does() -> None:
    """After one that is not the last, too."""
    pair = _beside_fsdp2(lambda: Slim(1))
    for is_last in (False, True):
        pair.change(lambda model: model.set_is_last_backward(is_last))  # noqa: B023  runs at once
        pair.backward()
        compare_gradients(pair.model, pair.reference, within=(0.0, CLOSE))


# With what else changes what is sent.


@pytest.mark.long
@on_ranks(world_size=4)
def test_float16_divides_by_a_power_of_two_before_the_sum_and_by_the_rest_after() -> None:
    """The gradient of a weight that is near float16's largest number on every rank, held once; and all divisors."""
    model = nn.Linear(1, 1, bias=False)
    fully_shard(model, mp_policy=HALF)
    compiled = compile_eagerly(model)
    x = torch.full((1, 1), 10_000.0)
    with no_sync(model):
        compiled(x).sum().backward()
    compiled(2 * x).sum().backward()
    assert isinstance(model.weight.grad, DTensor)
    nodes = [node for ran in regions_of(units(model)) for step in ran.steps for node in step.graph.nodes]
    divisors = [node.args[1] for node in nodes if node.target is torch.ops.aten.div.Tensor]
    gradient = model.weight.grad.full_tensor().item()
    assert gradient == 30_000.0, "the sum over four ranks does not fit into float16, half of it does"
    assert divisors == [2.0, 2.0]


@pytest.mark.long
@pytest.mark.core
@long.parametrize("world_size", [2, 4], always=[2])
@on_ranks(world_size=lambda world_size: world_size)
def test_a_planned_schedule_holds_and_reduces_in_part(world_size: int) -> None:
    """On two ranks the replicas have shard groups of one rank, whose reductions are all-reduces alone."""
    mesh = mesh_of((2, world_size // 2))
    pair = make_pair(options={"prefetch": "auto"}, mesh=mesh, reshard_after_forward=False)
    hold(pair)
    for sums_all in (False, True):
        pair.call.set_requires_all_reduce(sums_all)
        pair.backward()
    assert is_close(pair)


@on_ranks()
def test_reshard_after_forward_can_be_changed_between_steps() -> None:
    pair = make_pair()
    gathers = []
    for frees, held in ((True, False), (False, False), (False, True)):
        pair.call.set_reshard_after_forward(frees)
        with no_sync(pair.call) if held else contextlib.nullcontext():
            pair.backward()
            pair.backward()
        pair.backward()
        assert is_close(pair)
        pair.update()
        steps = [step for ran in regions_of(units(pair.model)) for step in ran.steps]
        gathers.append(sum(len(list(step.nodes(Role.GATHER))) for step in steps))
    freed, kept, _ = gathers
    assert freed == 2 * kept > 0


@pytest.mark.long
@long.parametrize("world_size", [1, 2], always=[2])
@on_ranks(world_size=lambda world_size: world_size)
def test_a_hook_is_called_once_with_the_sum_of_held_and_new_gradients(world_size: int) -> None:
    pair = make_pair()
    average = Averaging()
    register_comm_hook(pair.model, average)
    groups = sum(len(unit.groups) for unit in units(pair.model))
    for step in range(2):
        hold(pair)
        assert len(average.calls) == step * groups
        pair.backward()
        assert len(average.calls) == (step + 1) * groups
        assert is_close(pair)
        pair.update()


@pytest.mark.long
@on_ranks()
def test_gradients_accumulate_where_parameters_travel_in_8_bits() -> None:
    torch.manual_seed(0)
    model: Any = fully_shard(Stack(1), mp_policy=MixedPrecision(gather_dtype=torch.int8))
    compiled: Any = compile_eagerly(model)
    mine = share(batches(1, 8)[0])
    loss_of(compiled(mine)).backward()
    once = [p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()
    first, second = mine.chunk(2)
    with no_sync(model):
        (loss_of(compiled(first)) / 2).backward()
    (loss_of(compiled(second)) / 2).backward()
    pairs = zip(once, model.parameters(), strict=True)
    assert max((a - p.grad.full_tensor()).abs().max().item() for a, p in pairs) < CLOSE


@on_ranks()
def test_an_uncompiled_forward_between_two_microbatches_takes_nothing_from_them() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    sharded = fully_shard(copy.deepcopy(plain))
    compiled = compile_eagerly(sharded)
    first, other, second = torch.randn(3, 4, 8)
    for _ in range(2):
        for model in (plain, sharded):
            model.zero_grad()
        with no_sync(sharded):
            compiled(first).square().sum().backward()
        with torch.no_grad():
            sharded(other)
        compiled(second).square().sum().backward()
        (plain(first).square().sum() + plain(second).square().sum()).backward()
        assert gradient_difference(sharded, plain) < 1e-5
