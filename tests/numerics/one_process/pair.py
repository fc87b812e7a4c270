"""Trains a compiled model on several ranks beside a copy of it in one process on the whole batch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import clip_grad_norm_

LEARNING_RATE = 1e-2
EPS = 1e-3
"""Added to the root of squared gradients. With AdamW's own 1e-8 an update is the sign of its gradient, so that sums of
float32 in another order move a parameter by the learning rate wherever its gradient is zero but for rounding: how many
those are depends on the processor."""
Prepare = Callable[[nn.Module], object]


@dataclasses.dataclass
class Differences:
    """Largest differences between the two over all steps; `None` gradients must agree exactly.

    Attributes:
        loss: Relative to the loss.
        gradient: Relative to the largest element of the parameter's gradient.
        parameter: Absolute, in units of the learning rate.
    """

    loss: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0


def loss_of(output: Any) -> torch.Tensor:
    """A loss that averages over the batch, of any kind of output."""
    return getattr(output, "logits", output).float().square().mean()


def batches(steps: int, rows: int, *, seed: int = 1) -> list[torch.Tensor]:
    """The same batches on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 32, generator=generator) for _ in range(steps)]


def train_pair(
    make: Callable[[], nn.Module],
    *,
    lower: str = "eager",
    prepare: Prepare | None = None,
    options: dict[str, Any] | None = None,
    steps: int = 3,
    autocast: torch.dtype | None = None,
    clip: float | None = None,
    sizes: tuple[int, ...] = (4,),
) -> Differences:
    """Trains both and compares after every step; to be called on every rank.

    Args:
        make: Makes the model.
        lower: As in `FSDPOptions`.
        prepare: Called with the model before it is compiled (`fully_shard`, say).
        options: More options of the compile.
        steps: Optimizer steps.
        autocast: Runs both forwards under this autocast dtype.
        clip: Clips gradient norms to this.
        sizes: Rows per rank, one after the other, over and over.
    """
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    if prepare is not None:
        prepare(model)
    # Of a plain model: it gets the sharded parameters at the first call.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE, eps=EPS)
    compiled = torch.compile(model, backend="fsdp", options={"lower": lower, **(options or {})})
    world, rank = dist.get_world_size(), dist.get_rank()
    found = Differences()
    for step in range(steps):
        (batch,) = batches(1, sizes[step % len(sizes)] * world, seed=step)
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = loss_of(compiled(batch.chunk(world)[rank]))
            reference_loss = loss_of(reference(batch))
        loss.backward()
        reference_loss.backward()
        found.loss = max(found.loss, relative(mean_over_ranks(loss.detach()), reference_loss.detach()))
        found.gradient = max(found.gradient, gradient_difference(model, reference))
        if clip is not None:
            is_split = all(isinstance(p, DTensor) for p in model.parameters())
            # torch's does not mix DTensors and tensors.
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip) if is_split else clip_grad_norm_(model, clip)
            reference_norm = nn.utils.clip_grad_norm_(reference.parameters(), clip)
            found.gradient = max(found.gradient, relative(whole(norm), reference_norm))
        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()
    found.parameter = parameter_difference(model, reference) / LEARNING_RATE
    return found


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The average over the world, in float32."""
    value = value.float().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return ((value - reference).abs().max() / reference.abs().max().clamp(min=1e-6)).item()


def gradient_difference(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference of a parameter's gradient, relative to its largest element."""
    worst = 0.0
    for (name, mine), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), f"{name}: {mine.grad} against {theirs.grad}"
        if theirs.grad is None or theirs.numel() == 0:
            continue
        assert mine.grad is not None
        assert isinstance(mine.grad, DTensor) == isinstance(mine, DTensor), name
        worst = max(worst, relative(whole(mine.grad), theirs.grad))
    return worst


def parameter_difference(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference of any element of any parameter."""
    worst = 0.0
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        is_split = mine.dim() > 0 and mine.numel() > 0 and (mine.is_floating_point() or mine.is_complex())
        assert isinstance(mine, DTensor) == is_split
        if theirs.numel():
            worst = max(worst, (whole(mine) - theirs).abs().max().item())
    return worst


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
