"""Accumulation together with all that changes what is sent: low precision, hooks, 8 bits, planned schedules."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from fsdp_compile import MixedPrecision, fully_shard, no_sync, register_comm_hook, units
from fsdp_compile.fsdp2.unit import Unit
from fsdp_compile.ir.graph import Role
from fsdp_compile.lower.region import regions_of
from tests import long
from tests.models.kinds import Slim, Stack
from tests.numerics.one_process.measure import batches, gradient_difference
from tests.numerics.one_process.test_accumulation import CLOSE
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import WithFsdp2, WithOneProcess, loss_of, sgd, share

MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
HALF = MixedPrecisionPolicy(torch.float16, torch.float16)


def _pair(
    *, make: Callable[[], nn.Module] = lambda: Slim(1), options: dict[str, Any] | None = None, **arguments: Any
) -> WithOneProcess:
    torch._dynamo.reset()  # pairs share the code of a forward, of which Dynamo keeps eight graphs
    shard = functools.partial(fully_shard, **arguments)
    return WithOneProcess(make, shard=shard, optimizer=sgd, shape=32, rows=4, twice=False, **(options or {}))


def _train(pair: WithOneProcess, *, synchronizes: bool = False) -> float:
    """Three microbatches, two of them in `no_sync` unless each synchronizes; the largest difference."""
    with contextlib.nullcontext() if synchronizes else no_sync(pair.call):
        pair.backward()
        pair.backward()
    pair.backward()
    worst = gradient_difference(*pair)
    pair.update()
    return worst


@pytest.mark.core
@pytest.mark.long
@long.parametrize("policy", [MIXED, HALF], always=[MIXED], ids=["bf16", "fp16"])
@on_ranks(world_size=4)
def test_low_precision_accumulates_as_fsdp2_does_bit_by_bit(policy: MixedPrecisionPolicy) -> None:
    """Compares gradients with FSDP2's after one held, one partly held and one reduced microbatch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def shard(model: Any, fully_shard: Any = fsdp2) -> None:
        for part in (model.blocks[0], model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
            if policy.reduce_dtype is not torch.float16:
                part.set_force_sum_reduction_for_comms(True)  # gloo cannot divide for FSDP2

    data = [share(batch) for batch in batches(3, 16)]
    pair = WithFsdp2(lambda: Stack(1), shard, data.__getitem__, ours=lambda model: shard(model, fully_shard))
    pair.compiled(fullgraph=False)
    pair.change(lambda model: model.set_requires_gradient_sync(False))
    pair.backward()
    pair.change(lambda model: model.set_requires_gradient_sync(True))
    pair.change(lambda model: model.set_requires_all_reduce(False))
    pair.backward()
    pair.change(lambda model: model.set_requires_all_reduce(True))
    pair.backward()
    pair.compare_gradients()


@pytest.mark.long
@on_ranks(world_size=4)
def test_float16_divides_by_a_power_of_two_before_the_sum_and_by_the_rest_after() -> None:
    """The gradient of a weight that is near float16's largest number on every rank, held once; and all divisors."""
    model = nn.Linear(1, 1, bias=False)
    fully_shard(model, mp_policy=HALF)
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
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
@pytest.mark.inductor
@on_ranks(timeout_s=500)
def test_under_inductor() -> None:
    """Unreduced gradients and kept parameters are inputs of kernels."""
    assert (_train(_pair(make=Slim, options={"lower": "inductor"}, reshard_after_forward=False))) < 10 * CLOSE


def _planned() -> float:
    """One microbatch that is held, one that is summed inside of shard groups, one that is summed over all ranks."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    pair = _pair(options={"prefetch": "auto"}, mesh=mesh, reshard_after_forward=False)
    with no_sync(pair.call):
        pair.backward()
    pair.call.set_requires_all_reduce(False)
    pair.backward()
    pair.call.set_requires_all_reduce(True)
    pair.backward()
    return gradient_difference(*pair)


@pytest.mark.long
@pytest.mark.core
@long.parametrize("world_size", [2, 4], always=[2])
def test_a_planned_schedule_holds_and_reduces_in_part(world_size: int) -> None:
    """On two ranks the replicas have shard groups of one rank, whose reductions are all-reduces alone."""
    assert max(run_ranks(_planned, world_size=world_size)) < CLOSE


@on_ranks()
def test_reshard_after_forward_can_be_changed_between_steps() -> None:
    """Gathers of forward and backward after each change of `set_reshard_after_forward`."""
    pair = _pair()
    gathers, worst = [], 0.0
    for frees in (True, False):
        pair.call.set_reshard_after_forward(frees)
        worst = max(worst, _train(pair, synchronizes=True))
        gathers.append(_collectives(pair.model, Role.GATHER))
    worst, (freed, kept) = max(worst, _train(pair)), gathers
    assert worst < CLOSE
    assert freed == 2 * kept > 0


def _collectives(model: nn.Module, role: Role) -> int:
    return sum(len(list(step.nodes(role))) for ran in regions_of(units(model)) for step in ran.steps)


class Average:
    """A hook that averages and counts how often it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _state: object, gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
        self.calls += 1
        reduced = gradient if output is None else output
        if output is None:
            dist.all_reduce(gradient)
        else:
            dist.reduce_scatter_tensor(output, gradient)
        reduced /= dist.get_world_size()


def _hooked() -> tuple[float, list[int], int]:
    pair = _pair()
    hook = Average()
    register_comm_hook(pair.model, hook)
    calls, worst = [], 0.0
    for _ in range(2):
        with no_sync(pair.call):
            pair.backward()
        calls.append(hook.calls)
        pair.backward()
        calls.append(hook.calls)
        worst = max(worst, gradient_difference(*pair))
        pair.update()
    return worst, calls, _flats(units(pair.model))


def _flats(every: list[Unit]) -> int:
    return sum(len(unit.groups) for unit in every)


@pytest.mark.long
@long.parametrize("world_size", [1, 2], always=[2])
def test_a_hook_is_called_once_with_the_sum_of_held_and_new_gradients(world_size: int) -> None:
    for worst, calls, flats in run_ranks(_hooked, world_size=world_size):
        assert worst < CLOSE
        assert calls == [0, flats, flats, 2 * flats]


@pytest.mark.long
@on_ranks()
def test_gradients_accumulate_where_parameters_travel_in_8_bits() -> None:
    """The difference of unreduced gradients from those of one batch."""
    torch.manual_seed(0)
    model: Any = Stack(1)
    fully_shard(model, mp_policy=MixedPrecision(gather_dtype=torch.int8))
    compiled: Any = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    (batch,) = batches(1, 8)
    mine = batch.chunk(2)[dist.get_rank()]
    loss_of(compiled(mine)).backward()
    once = [p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()
    first, second = mine.chunk(2)
    with no_sync(model):
        (loss_of(compiled(first)) / 2).backward()
    (loss_of(compiled(second)) / 2).backward()
    pairs = zip(once, model.parameters(), strict=True)
    assert (max((a - p.grad.full_tensor()).abs().max().item() for a, p in pairs)) < CLOSE
