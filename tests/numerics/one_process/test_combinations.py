"""What was built one by one, used together: gradients equal those of one process, up to the roundings on their way."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.tensor import DTensor

from fsdp_compile import MixedPrecision, fully_shard, no_sync, register_comm_hook, units
from fsdp_compile.ir.graph import Role
from fsdp_compile.lower.region import regions_of
from tests import long
from tests.delayed_copies import ON_SUCH_A_HOST, delayed_copies
from tests.models.kinds import Slim, Stack
from tests.numerics.one_process.measure import Differences, gradient_difference, train_pair
from tests.numerics.one_process.strategies import PRECISIONS, STRATEGIES
from tests.ops.test_quantize import INT8, as_sent
from tests.ranks import on_ranks
from tests.two_sides import WithOneProcess, compare_parameters, compile_eagerly, loss_of, made, share

WIDTH, ROWS, STEPS = 128, 4, 2
LEARNING_RATE = 0.05
TERMS = 4 * (WIDTH + 1)
"""Of the sums that a gradient has passed: two in forward, two in backward, of as many terms each at most."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Options that meet."""

    strategy: str  # of `STRATEGIES`
    hook: Callable[..., None] | None = None  # averages the gradients, if given
    gather: torch.dtype | str | None = None  # dtype of weights on the wire
    held: bool = False  # whether the first of two micro-batches of a step is held back
    # To bfloat16 on the way of a gradient: one to send it, one to add it to a held one, and three to add up
    # four ranks. Their average is a division by a power of two: exact.
    roundings: int = 0
    shards: int = 4  # into how many each parameter is cut
    backward_over: int = 4  # ranks over which backward gathers


class Wide(nn.Module):
    """Two layers of which a quarter is more than the 16 KiB from which on parameters travel in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH + 1)
        self.down = nn.Linear(WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


CASES = {
    "kept parts, compressed, held": Case("integer", hook=bf16_compress_hook, held=True, roundings=5, backward_over=2),
    "kept parts, 8 bits, compressed": Case(
        "integer", hook=bf16_compress_hook, gather=INT8, roundings=4, backward_over=2
    ),
    "kept parts, 4 bits": Case("integer", gather="nvfp4", backward_over=2),
    "replicas, 8 bits, held": Case("hybrid", gather=INT8, held=True, shards=2, backward_over=2),
}


def _prepared(case: Case) -> nn.Module:
    model = made(Wide)
    arguments = {**STRATEGIES[case.strategy](), "mp_policy": MixedPrecision(gather_dtype=case.gather)}
    for part in (model.up, model.down, model):
        fully_shard(part, **arguments)
    if case.hook is not None:
        register_comm_hook(model, case.hook)
    return model


def _of_one_process(
    reference: nn.Module, case: Case, micro_batches: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The average over ranks of the summed gradients, and of the sums of their magnitudes."""
    low = copy.deepcopy(reference)
    world = dist.get_world_size()
    if case.gather is not None:
        with torch.no_grad():
            for p in low.parameters():
                p.copy_(as_sent(p, case.gather, case.shards) if p.dim() > 1 else p)
    parameters = list(low.parameters())
    wanted, magnitude = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    for batch in micro_batches:
        for rows in batch.chunk(world):
            for i, gradient in enumerate(torch.autograd.grad(loss_of(low(rows)), parameters)):
                wanted[i] += gradient / world
                magnitude[i] += gradient.abs() / world
    return wanted, magnitude


def _bounds(case: Case, magnitude: list[torch.Tensor]) -> list[torch.Tensor]:
    """What m roundings may do to each element, `(1 + u)^m - 1` of its terms, and what float32 does to sums."""
    u = torch.finfo(torch.bfloat16).eps / 2
    exact = TERMS * torch.finfo(torch.float32).eps
    return [((1 + u) ** case.roundings - 1) * m + exact * m.max() for m in magnitude]


@pytest.mark.core
@long.parametrize("name", CASES, always=["kept parts, compressed, held"])
@on_ranks(world_size=4)
def test_together_they_equal_one_process(name: str) -> None:
    case = CASES[name]
    model, reference = _prepared(case), made(Wide)
    compiled = compile_eagerly(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=LEARNING_RATE) for m in (model, reference)]
    relative = 0.0
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        micro_batches = [torch.randn(ROWS * dist.get_world_size(), WIDTH, generator=generator) for _ in range(2)]
        for index, batch in enumerate(micro_batches):
            with no_sync(model) if case.held and index == 0 else nullcontext():
                loss_of(compiled(share(batch))).backward()
        wanted, magnitude = _of_one_process(reference, case, micro_batches)
        for mine, theirs, bound, gradient in zip(
            model.parameters(), reference.parameters(), _bounds(case, magnitude), wanted, strict=True
        ):
            assert isinstance(mine.grad, DTensor)
            theirs.grad = mine.grad.full_tensor()  # so that rounding does not lead the two apart
            difference = (theirs.grad - gradient).abs()
            assert (difference / bound).max() <= 1
            relative = max(relative, (difference.max() / gradient.abs().max()).item())
        for each in optimizers:
            each.step()
            each.zero_grad()
        compare_parameters(model, reference, (0.0, 0.0))
    assert (relative > 1e-4) == (case.roundings > 0), "narrow where asked for, and only there"
    backward = [step for ran in regions_of(units(model)) for step in ran.steps[1:]]
    assert {node.args[1] for each in backward for node in each.nodes(Role.GATHER)} == {case.backward_over}


# Offloaded units, on a machine whose copies are as late as they may be.

CASES_too: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kept by neighbours": ("integer", "fp32", {}),
    "planned replicas, mixed precision": ("hybrid-zero2", "bf16", {"prefetch": "auto"}),
    "replicas alone, two buckets ahead": ("no-shard", "fp32", {"prefetch": 2}),
    "FSDP2's messages, nothing ahead": ("hybrid", "fp32", {"prefetch": 0, "reduce_layout": "fsdp2"}),
}
"""Strategy, precision and options."""


@pytest.mark.long
@pytest.mark.core
@pytest.mark.parametrize("strategy", ["full", "hybrid"])
@on_ranks(world_size=4)
def test_offloaded_gradients_that_are_held_back_equal_one_process(strategy: str) -> None:
    with delayed_copies() as copied:
        shard = functools.partial(fully_shard, **STRATEGIES[strategy](), offload_policy=ON_SUCH_A_HOST)
        pair = WithOneProcess(lambda: Stack(1), shard=shard, shape=32, rows=4, twice=False)
        for is_last in (False, True):
            if strategy == "full":
                pair.model.set_requires_gradient_sync(is_last)
            else:
                pair.model.set_requires_all_reduce(is_last)
            pair.backward()
    assert gradient_difference(*pair) < 1e-5
    assert copied


@pytest.mark.core
@long.parametrize("name", CASES_too, always=["planned replicas, mixed precision"])
@on_ranks(world_size=4)
def test_every_combination_equals_one_process(name: str) -> None:
    strategy, precision, options = CASES_too[name]
    arguments = {**STRATEGIES[strategy](), "mp_policy": PRECISIONS[precision], "offload_policy": ON_SUCH_A_HOST}
    within = Differences(1e-6, 2e-5, math.inf) if precision == "fp32" else Differences(2e-2, 1e-1, math.inf)
    with delayed_copies() as copied:
        train_pair(Slim, prepare=functools.partial(fully_shard, **arguments), options=options, steps=2, within=within)
    # Each unit goes in twice per step, and its gradients out once; kept parameters go in once.
    assert len(copied) >= 2 * 3 * 2
