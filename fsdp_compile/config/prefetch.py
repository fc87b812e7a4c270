"""FSDP1's rules for when an all-gather starts."""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

from torch.distributed.fsdp import BackwardPrefetch

from fsdp_compile.config.choices import BACKWARD_PREFETCH, SHORT_FORMS
from fsdp_compile.errors import ConfigError

_RULES: Final = {name: None if name == "none" else BackwardPrefetch[name] for name in BACKWARD_PREFETCH}


class Ahead(enum.StrEnum):
    """Where the all-gather of a bucket starts in one graph."""

    AT_NEED = "at-need"
    """Where its parameters are used first."""
    BEFORE_COMPUTE = "before-compute"
    """Where the bucket before it is used first: two buckets are unsharded at once."""
    AFTER_COMPUTE = "after-compute"
    """Where the bucket before it is resharded and its gradients are computed, before their reduction: one is."""
    AT_ONCE = "at-once"
    """At the top of the graph."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FSDPPrefetch:
    """FSDP1's arguments about prefetching, with its defaults, for `options={"prefetch": ...}`.

    Attributes:
        backward: `BACKWARD_PRE` starts the next unit's all-gather before this unit's gradients are computed (two units
            are unsharded at once), `BACKWARD_POST` after them, when this unit is resharded, and before their reduction
            (one unit is unsharded), `None` where the unit is needed.
        forward: Whether the next unit's all-gather starts before this unit's forward is computed (two units are
            unsharded at once), or where the unit is needed.
        limit_all_gathers: Whether no more than one all-gather is ahead of the unit in use. If not, what starts ahead
            (`forward`, `BACKWARD_PRE`) starts at the top of its graph, as when a host runs ahead of its device without
            end: everything may be unsharded at once.
    """

    backward: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward: bool = False
    limit_all_gathers: bool = True

    def __post_init__(self) -> None:
        if self.backward is not None and not isinstance(self.backward, BackwardPrefetch):
            raise _bad("backward", self.backward, "a torch.distributed.fsdp.BackwardPrefetch, or None")
        for name in ("forward", "limit_all_gathers"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "True or False")
        if not self.limit_all_gathers and not self.forward and self.backward is not BackwardPrefetch.BACKWARD_PRE:
            raise ConfigError(
                "limit_all_gathers=False lifts a limit from gathers that start ahead, and none does",
                where=f"FSDPPrefetch(backward={self.backward}, forward=False, limit_all_gathers=False)",
                instead="forward=True or BACKWARD_PRE, or leave limit_all_gathers out",
            )

    @property
    def in_forward(self) -> Ahead:
        """The rule for forward graphs."""
        return self._started_ahead if self.forward else Ahead.AT_NEED

    @property
    def in_backward(self) -> Ahead:
        """The rule for backward graphs."""
        if self.backward is None:
            return Ahead.AT_NEED
        return self._started_ahead if self.backward is BackwardPrefetch.BACKWARD_PRE else Ahead.AFTER_COMPUTE

    @property
    def _started_ahead(self) -> Ahead:
        return Ahead.BEFORE_COMPUTE if self.limit_all_gathers else Ahead.AT_ONCE


def named_rules(value: object) -> FSDPPrefetch | None:
    """The rules of a short form: torch's enum, or one of `SHORT_FORMS`; `None` for anything else."""
    if isinstance(value, FSDPPrefetch):
        return value
    if isinstance(value, BackwardPrefetch):
        return FSDPPrefetch(backward=value)
    if not isinstance(value, str) or value not in SHORT_FORMS:
        return None
    name, _, forward = value.partition("+")
    return FSDPPrefetch(backward=_RULES[name], forward=bool(forward))


def _bad(name: str, value: object, instead: str) -> ConfigError:
    return ConfigError(f"{name} cannot be {value!r}", where=f"FSDPPrefetch({name}=...)", instead=instead)
