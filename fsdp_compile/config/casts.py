"""What is cast where values enter and leave a module."""

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
    """What is cast at a module that a policy was set on.

    Attributes:
        inputs: Dtype of floating-point inputs; `None` leaves them.
        output: Dtype of floating-point outputs; `None` leaves them.
        when: In which mode inputs are cast.
    """

    inputs: torch.dtype | None
    output: torch.dtype | None
    when: CastWhen = CastWhen.ALWAYS


@dataclasses.dataclass(frozen=True)
class FullPrecision:
    """A module that computes in its own dtype whatever is around it: outputs get the dtype that its inputs had.

    Attributes:
        dtype: Dtype of its parameters.
    """

    dtype: torch.dtype
