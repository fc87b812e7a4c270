"""Updates in backward: the bits of `optimizer.step()` after it, and the numbers of one process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import OffloadPolicy

from fsdp_compile import fully_shard, no_sync, step_in_backward
from tests import long
from tests.delayed_copies import ON_SUCH_A_HOST, delayed_copies
from tests.models.kinds import KINDS, Slim
from tests.numerics.one_process.measure import batches, parameter_difference
from tests.numerics.one_process.strategies import PRECISIONS, STRATEGIES
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import loss_of

STEPS = 2
RATE = 1e-2
MOMENTUM = functools.partial(optim.SGD, momentum=0.9)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        make: Makes the model.
        kind: Makes the optimizer.
        strategy: Name in `STRATEGIES`.
        precision: Name in `PRECISIONS`.
        microbatches: Backwards per step, all but the last under `no_sync`.
        options: Of the compile.
        offload: As in `fully_shard`.
    """

    make: Callable[[], nn.Module] = Slim
    kind: Callable[..., optim.Optimizer] = optim.AdamW
    strategy: str = "full"
    precision: str = "fp32"
    microbatches: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    offload: OffloadPolicy = dataclasses.field(default_factory=OffloadPolicy)


@dataclasses.dataclass
class Trained:
    """A model after its training, and how its optimizer was called."""

    model: nn.Module
    in_backward: int = 0
    after: int = 0


def _optimizer(case: Case, model: nn.Module) -> optim.Optimizer:
    """Two groups that share parameter groups, with different settings."""
    parameters = list(model.parameters())
    decayed = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}
    return case.kind([decayed, {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}], lr=RATE)


def _train(case: Case, *, in_backward: bool) -> Trained:
    torch._dynamo.reset()  # all cases compile the same code
    torch.manual_seed(0)
    model = case.make()
    fully_shard(model, mp_policy=PRECISIONS[case.precision], offload_policy=case.offload, **STRATEGIES[case.strategy]())
    optimizer = _optimizer(case, model)
    if in_backward:
        step_in_backward(optimizer)
    run = torch.compile(model, backend="fsdp", options={"lower": "eager", **case.options})
    trained, is_backward = Trained(model), [False]

    def note(*_: Any) -> None:
        trained.in_backward += is_backward[0]
        trained.after += not is_backward[0]

    optimizer.register_step_pre_hook(note)
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(STEPS):
        for number in range(case.microbatches):
            with no_sync(model) if number + 1 < case.microbatches else contextlib.nullcontext():
                loss = loss_of(run(_batch(step, number).chunk(dist.get_world_size())[dist.get_rank()]))
                is_backward[0] = True
                loss.backward()
                is_backward[0] = False
        if in_backward:
            assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return trained


def _batch(step: int, number: int) -> torch.Tensor:
    (batch,) = batches(1, 4 * dist.get_world_size(), seed=10 * step + number)
    return batch


def _alone(case: Case) -> nn.Module:
    """The same in one process: plain torch on the whole batch."""
    torch.manual_seed(0)
    model = case.make()
    optimizer = _optimizer(case, model)
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(STEPS):
        for number in range(case.microbatches):
            loss_of(model(_batch(step, number))).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def _bits(case: Case) -> tuple[int, int]:
    """Elements that differ from a step after backward, and updates that were made in backward."""
    mine, theirs = _train(case, in_backward=True), _train(case, in_backward=False)
    assert mine.after == STEPS, "optimizer.step() goes on to work"
    assert theirs.in_backward == 0
    differing = 0
    for p, q in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
        differing += int((_local(p) != _local(q)).sum())
    return differing, mine.in_backward


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to_local()  # type: ignore[attr-defined]


BITS = {
    "adamw": Case(),
    "momentum, accumulated": Case(kind=MOMENTUM, microbatches=2),
    "three graphs": Case(KINDS["graph-breaks"], options={"prefetch": 1}),
}


@pytest.mark.core
@long.parametrize("name", BITS, always=["momentum, accumulated"])
def test_the_bits_are_those_of_a_step_after_backward(name: str) -> None:
    # Behind the graph breaks FSDP2's hooks gather the head, whose 2 parameters are updated one by one.
    updates = STEPS * (5 if name == "three graphs" else 3)
    assert run_ranks(_bits, BITS[name]) == [(0, updates)] * 2


REPLICAS = "replicas, mixed precision"
NUMBERS = {
    "used twice": Case(KINDS["repeated"]),
    "partly eager": Case(KINDS["uncompiled"], kind=MOMENTUM),
    "recomputed, kept": Case(KINDS["checkpointed"], kind=MOMENTUM, strategy="grad-op"),
    "tied, nothing ahead": Case(KINDS["tied"], kind=MOMENTUM, options={"prefetch": 0}),
    "replicas alone": Case(kind=MOMENTUM, strategy="no-shard"),
    "offloaded": Case(kind=MOMENTUM, offload=ON_SUCH_A_HOST),
    REPLICAS: Case(kind=MOMENTUM, strategy="hybrid", precision="bf16"),
}


def _difference(name: str) -> tuple[float, int]:
    case = NUMBERS[name]
    with delayed_copies() if case.offload is ON_SUCH_A_HOST else contextlib.nullcontext():
        trained = _train(case, in_backward=True)
    return parameter_difference(trained.model, _alone(case)) / RATE, trained.in_backward


@long.parametrize(
    "name", [name for name in NUMBERS if name != REPLICAS], always=["used twice", "partly eager", "offloaded"]
)
def test_every_way_to_a_gradient_equals_one_process(name: str) -> None:
    for difference, updates in run_ranks(_difference, name):
        assert updates > 0
        assert difference < 2e-2, f"{difference} of the learning rate"


@pytest.mark.long
def test_replicas_and_mixed_precision_equal_one_process() -> None:
    for difference, updates in run_ranks(_difference, REPLICAS, world_size=4):
        assert difference < 0.2
        assert updates == STEPS * 3


@on_ranks()
def test_an_update_waits_for_the_last_graph_that_reads_its_unit() -> None:
    """One model called twice, and one backward: the update waits for the second graph."""
    torch.manual_seed(0)
    model = Slim()
    alone = copy.deepcopy(model)
    fully_shard(model)
    optimizers = step_in_backward(MOMENTUM(model.parameters(), lr=RATE)), MOMENTUM(alone.parameters(), lr=RATE)
    run = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(2):
        one, two = batches(2, 4 * world, seed=step)
        (loss_of(run(one.chunk(world)[rank])) + loss_of(run(two.chunk(world)[rank]))).backward()
        (loss_of(alone(one)) + loss_of(alone(two))).backward()
        assert all(p.grad is None for p in model.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert (parameter_difference(model, alone) / RATE) < 2e-2
