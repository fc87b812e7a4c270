"""Casts of a module's inputs and outputs."""

from __future__ import annotations

import dataclasses
import enum

import torch


class CastWhen(enum.Enum):
    """In which mode of the module its inputs are cast."""

    ALWAYS = "always"
    TRAINING = "training"
    """Not in eval mode, where parameters are read in their own dtype."""


@dataclasses.dataclass(frozen=True)
class ForwardCasts:
    """Casts of a module with a policy: dtypes of floating-point inputs and outputs; `None` leaves them."""

    inputs: torch.dtype | None
    output: torch.dtype | None
    when: CastWhen = CastWhen.ALWAYS


@dataclasses.dataclass(frozen=True)
class FullPrecision:
    """A module that computes in its own dtype whatever surrounds it: outputs get the dtype of its inputs."""

    dtype: torch.dtype
