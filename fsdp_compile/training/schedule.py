"""The learning rate of every step: a linear rise, then half a cosine down."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_compile.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate that depends on the step alone, so a resumed run needs no state of it.

    Attributes:
        highest: Learning rate at the end of the rise.
        last: Learning rate of the last step.
        warmup_steps: Steps of the rise.
        steps: Steps in all.
    """

    highest: float
    last: float
    warmup_steps: int
    steps: int

    @classmethod
    def of(cls, config: TrainConfig) -> Schedule:
        """The schedule that the options ask for."""
        return cls(
            highest=config.learning_rate,
            last=config.learning_rate * config.final_ratio,
            warmup_steps=round(config.steps * config.warmup_ratio),
            steps=config.steps,
        )

    def __call__(self, step: int) -> float:
        """The learning rate of a step.

        Args:
            step: Counted from 1 to `steps`.

        Returns:
            `highest / warmup_steps` at step 1, `highest` at `warmup_steps`, `last` at `steps`.
        """
        if step <= self.warmup_steps:
            return self.highest * step / self.warmup_steps
        done = (step - self.warmup_steps) / (self.steps - self.warmup_steps)
        return self.last + (self.highest - self.last) * (1 + math.cos(math.pi * done)) / 2
