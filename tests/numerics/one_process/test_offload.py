"""Offloaded units with everything else, on a machine whose copies are as late as they may be: equal to one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compile
from fsdp_compile import fully_shard
from tests.delayed_copies import ON_SUCH_A_HOST, delayed_copies
from tests.models.kinds import Slim, Stack
from tests.numerics.one_process.pair import Differences, loss_of, train_pair
from tests.numerics.one_process.strategies import PRECISIONS, STRATEGIES
from tests.ranks import run_ranks

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kept by neighbours": ("integer", "fp32", {}),
    "planned replicas, mixed precision": ("hybrid-zero2", "bf16", {"prefetch": "auto"}),
    "replicas alone, two buckets ahead": ("no-shard", "fp32", {"prefetch": 2}),
    "FSDP2's messages, nothing ahead": ("hybrid", "fp32", {"prefetch": 0, "reduce_layout": "fsdp2"}),
}
"""Strategy, precision and options."""


def _train(cases: list[str]) -> dict[str, tuple[Differences, int]]:
    found = {}
    for name in cases:
        torch._dynamo.reset()  # all cases compile the same code
        strategy, precision, options = CASES[name]
        arguments = {**STRATEGIES[strategy](), "mp_policy": PRECISIONS[precision], "offload_policy": ON_SUCH_A_HOST}

        def prepare(model: nn.Module, arguments: dict[str, Any] = arguments) -> None:
            fully_shard(model, **arguments)

        with delayed_copies() as copied:
            found[name] = train_pair(Slim, prepare=prepare, options=options, steps=2), len(copied)
    return found


def _accumulate(strategy: str, held: str) -> tuple[float, int]:
    """Two backwards of which the first is held back: the largest difference of a gradient."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack(1)
    reference = copy.deepcopy(model)
    world, rank = dist.get_world_size(), dist.get_rank()
    with delayed_copies() as copied:
        fully_shard(model, **STRATEGIES[strategy](), offload_policy=ON_SUCH_A_HOST)
        compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
        for step in range(2):
            batch = torch.randn(4 * world, 32, generator=torch.Generator().manual_seed(step))
            if held == "replicas":
                model.set_requires_all_reduce(step % 2 == 1)  # type: ignore[operator]
            with fsdp_compile.no_sync(model) if held == "all" and step % 2 == 0 else nullcontext():
                loss_of(compiled(batch.chunk(world)[rank])).backward()
            loss_of(reference(batch)).backward()
    worst = 0.0
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert theirs.grad is not None
        assert mine.grad is not None
        difference = (mine.grad.full_tensor() - theirs.grad).abs().max() / theirs.grad.abs().max()  # type: ignore[attr-defined]
        worst = max(worst, difference.item())
    return worst, len(copied)


def _all() -> tuple[dict[str, tuple[Differences, int]], dict[str, tuple[float, int]]]:
    trained = _train(list(CASES))
    held = (("full", "all"), ("hybrid", "replicas"))
    return trained, {f"{strategy}, {what}": _accumulate(strategy, what) for strategy, what in held}


@pytest.mark.core
def test_every_combination_equals_one_process() -> None:
    for trained, accumulated in run_ranks(_all, world_size=4):
        assert trained.keys() == CASES.keys()
        for name, (differences, copies) in trained.items():
            exact = CASES[name][1] == "fp32"
            assert differences.loss < (1e-6 if exact else 2e-2), name
            assert differences.gradient < (2e-5 if exact else 1e-1), name
            # Each unit goes in twice per step, and its gradients out once; kept parameters go in once.
            assert copies >= 2 * 3 * 2, name
        for name, (difference, copies) in accumulated.items():
            assert difference < 1e-5, name
            assert copies > 0, name
