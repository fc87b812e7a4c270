"""What a plan starts."""

from __future__ import annotations

import dataclasses
import enum


class What(enum.Enum):
    """What is started for a bucket that is gathered."""

    COPY = "copy"
    """The copy from the host that the gather sends."""
    GATHER = "gather"


@dataclasses.dataclass(frozen=True)
class Start:
    """One start: of what, for which gather, at which position."""

    what: What
    gather: int
    position: int
