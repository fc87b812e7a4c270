"""Measures how far a compiled model on several ranks is from a copy of it in one process on the whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import clip_grad_norm_
from tests.two_sides import Run, WithOneProcess, both, can_be_split, mean_over_ranks, whole

LEARNING_RATE = 1e-2
EPS = 1e-3
"""Added to the root of squared gradients. With AdamW's own 1e-8 an update is the sign of its gradient, so that sums of
float32 in another order move a parameter by the learning rate wherever its gradient is zero but for rounding: how many
those are depends on the processor."""


def adamw_with_eps(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of measured trainings."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=EPS)


class OneOfTwo(nn.Module):
    def __init__(self, inputs: int = 6, outputs: int = 6, *, bias: bool = True) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(inputs, outputs, bias=bias) for _ in range(2))
        self.chosen = "first"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.chosen)(x)


Prepare = Callable[[nn.Module], object]


@dataclasses.dataclass
class Differences:
    """Largest differences from one process over all steps; `None` gradients must agree exactly."""

    loss: float = 0.0  # relative to the loss
    gradient: float = 0.0  # relative to the largest element of the parameter's gradient
    parameter: float = 0.0  # absolute, in units of the learning rate


CLOSE = Differences(1e-6, 2e-5, 1e-3)
"""Float32 sums of at most a few hundred terms in another order; attention's keys have gradients near zero."""


def assert_equal_training(worst: list[Differences], within: Differences = CLOSE) -> None:
    for found in worst:
        assert found.loss < within.loss
        assert found.gradient < within.gradient
        assert found.parameter < within.parameter


def train_pair(
    make: Callable[[], nn.Module],
    *,
    lower: str = "eager",
    prepare: Prepare | None = None,
    options: dict[str, Any] | None = None,
    steps: int = 3,
    clip: float | None = None,
    within: Differences = CLOSE,
) -> Differences:
    """Trains a model beside one process and measures how far they are apart; to be called on every rank.

    Args:
        make: Makes the model.
        lower: As in `FSDPOptions`.
        prepare: Called with the model before it is compiled (`fully_shard`, say).
        options: More options of the compile.
        steps: Optimizer steps.
        clip: Clips gradient norms to this.
        within: How far they may be apart.
    """
    pair = WithOneProcess(
        make,
        Run.PLAIN if prepare is None else Run.SHARDED,
        prepare or id,
        optimizer=adamw_with_eps,
        shape=32,
        rows=4,
        twice=False,
        **{"lower": lower, **(options or {})},
    )
    found = Differences()
    for _ in range(steps):
        mine, theirs = pair.losses()
        mine.backward()
        theirs.backward()
        found.loss = max(found.loss, relative(mean_over_ranks(mine), theirs.detach()))
        found.gradient = max(found.gradient, gradient_difference(*pair))
        if clip is not None:
            is_split = all(isinstance(p, DTensor) for p in pair.model.parameters())
            # torch's does not mix DTensors and tensors.
            clipping: Any = nn.utils.clip_grad_norm_ if is_split else clip_grad_norm_
            norm = clipping(pair.model.parameters() if is_split else pair.model, clip)
            expected = nn.utils.clip_grad_norm_(pair.reference.parameters(), clip)
            found.gradient = max(found.gradient, relative(whole(norm), expected))
        pair.update()
    found.parameter = parameter_difference(*pair) / LEARNING_RATE
    assert_equal_training([found], within)
    return found


def batches(steps: int, rows: int, *, seed: int = 1) -> list[torch.Tensor]:
    """The same batches on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 32, generator=generator) for _ in range(steps)]


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return ((value - reference).abs().max() / reference.abs().max().clamp(min=1e-6)).item()


def gradient_difference(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference of a parameter's gradient, relative to its largest element; `None` must agree exactly."""
    worst = 0.0
    for name, mine, theirs in both(model, reference):
        assert (mine.grad is None) == (theirs.grad is None), f"{name}: {mine.grad} against {theirs.grad}"
        if mine.grad is None or theirs.grad is None or theirs.numel() == 0:
            continue
        assert isinstance(mine.grad, DTensor) == isinstance(mine, DTensor), name
        worst = max(worst, relative(whole(mine.grad), theirs.grad))
    return worst


def parameter_difference(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference of any element of any parameter."""
    worst = 0.0
    for name, mine, theirs in both(model, reference):
        assert isinstance(mine, DTensor) == can_be_split(theirs), name
        if theirs.numel():
            worst = max(worst, (whole(mine) - theirs).abs().max().item())
    return worst
