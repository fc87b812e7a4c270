"""State of one parameter group that knows no group: gradients, gathered parameters, updates, settings."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping

import torch

from fsdp_compile.layout.spec import UnshardSpec, Update


@dataclasses.dataclass
class CommSettings:
    """What the next forward and backward passes do with gradients and parameters; users change it between steps.

    Attributes:
        reduce_gradients: Whether gradients are summed over ranks at all.
        all_reduce: Whether they are summed over replicas.
        last_backward: Whether the next backward writes gradients to the parameters' `.grad`.
        reshard_after_backward: Whether gathered parameters are freed after backward.
        divide: What the sum of gradients is divided by; `None` for the number of ranks.
        sum_only: Whether collectives may only sum, so that the division is a step of its own.
    """

    reduce_gradients: bool = True
    all_reduce: bool = True
    last_backward: bool = True
    reshard_after_backward: bool = True
    divide: float | None = None
    sum_only: bool = False


class WrapSource(enum.Enum):
    """Why a unit exists."""

    CALL = "call"
    """A person chose it: `fully_shard` was called on its root module, or a wrap policy named it."""
    SPLIT = "split"
    """The automatic split of a larger model made it."""


class ReduceGroup(enum.Enum):
    """Which process group reduce-scatters gradients; collectives of one group wait for each other."""

    SHARED = "shared"
    """The one that gathers parameters."""
    OWN = "own"
    """A second one of the same ranks."""


class ParamState(enum.Enum):
    """What the modules of a unit hold."""

    SHARDED = "sharded"
    """DTensors, views of the unit's parameter groups."""
    UNSHARDED = "unsharded"
    """Plain, full parameters, inside of `full_params`."""


@dataclasses.dataclass
class AccumulatedGrad:
    """Gradients of some parameters of one flat parameter.

    Attributes:
        value: `[parts * numel]`: rank after rank, each with the rows that it will keep; one part for partial results.
        offsets: The parameters that have gradients in it.
        consumed: Slots whose gradients are still in `value` and no longer count.
    """

    value: torch.Tensor
    offsets: set[int]
    consumed: set[int] = dataclasses.field(default_factory=set)


class PendingGrads:
    """The place of one flat parameter's unreduced gradients.

    Args:
        specs: The parameters.
        parts: Into how many parts of the flat parameter's size the value is divided.
    """

    def __init__(self, specs: Iterable[UnshardSpec], parts: int) -> None:
        self._specs: Mapping[int, UnshardSpec] = {spec.offset: spec for spec in specs}
        self._parts = parts
        self._grad: AccumulatedGrad | None = None
        self._uncommitted: list[tuple[torch.Tensor, set[int]]] = []

    def __bool__(self) -> bool:
        return self._grad is not None

    @property
    def is_pending(self) -> bool:
        """Whether something is held, or was taken and has not arrived."""
        return self._grad is not None or bool(self._uncommitted)

    @property
    def value(self) -> torch.Tensor | None:
        """What is held, for a graph to borrow."""
        return None if self._grad is None else self._grad.value

    def add(self, gradient: torch.Tensor, offsets: Iterable[int]) -> None:
        """Accumulates a gradient that covers the parameters at `offsets`, and is zero elsewhere.

        Args:
            gradient: `[parts * numel]`, in the dtype of reductions; it is kept.
            offsets: Slots of the parameter group.
        """
        pending = self._grad
        if pending is None:
            self._grad = AccumulatedGrad(gradient, set(offsets))
        else:
            value = self._without(pending.value, pending.consumed) + gradient
            self._grad = AccumulatedGrad(value, pending.offsets | set(offsets))

    def consume(self, borrowed: torch.Tensor, offsets: Iterable[int]) -> torch.Tensor:
        """Gives away what is held of some parameters.

        Args:
            borrowed: What the taker was given when its forward ran; if something was added since, nothing is taken.
            offsets: Slots that the taker reduces; it does not look at others.

        Returns:
            A tensor like `borrowed`: the gradients of these parameters, zeros for those that were taken before.
        """
        pending, wanted = self._grad, set(offsets)
        if pending is None or pending.value.data_ptr() != borrowed.data_ptr():
            return torch.zeros_like(borrowed)
        value = self._without(borrowed, wanted & pending.consumed)
        self._uncommitted.append((pending.value, wanted & pending.offsets))
        pending.consumed |= wanted & pending.offsets
        pending.offsets -= wanted
        if not pending.offsets:
            self._grad = None
        return value

    def commit(self) -> None:
        """Notes that what was taken has arrived where it was to go."""
        self._uncommitted.clear()

    def roll_back(self) -> bool:
        """Holds again what was taken and never arrived: `torch.autograd.grad` drops gradients that nobody asked for.

        Returns:
            Whether there was anything.
        """
        lost, self._uncommitted = self._uncommitted, []
        for value, offsets in lost:
            if self._grad is not None and self._grad.value is value:
                self._grad.offsets |= offsets
                self._grad.consumed -= offsets
            else:
                self.add(self._without(value, self._specs.keys() - offsets), offsets)
        return bool(lost)

    def drain(self) -> AccumulatedGrad | None:
        """Gives away everything."""
        pending, self._grad = self._grad, None
        return pending and AccumulatedGrad(self._without(pending.value, pending.consumed), pending.offsets)

    def clear(self) -> None:
        """Forgets everything."""
        self._grad = None
        self._uncommitted.clear()

    def _without(self, value: torch.Tensor, offsets: Iterable[int]) -> torch.Tensor:
        """`value` with zeros in the parameters at `offsets`."""
        gone = [self._specs[offset] for offset in offsets]
        if not gone:
            return value
        rows = value.view(self._parts, -1).clone()
        for spec in gone:
            rows[:, spec.offset : spec.offset + spec.extent] = 0
        return rows.view(-1)


@dataclasses.dataclass(frozen=True)
class UnshardedParams:
    """Full parameters, and the moment at which they were those of the parameter group.

    Attributes:
        values: The full parameter of each parameter, by offset.
        version: Counters that change with the parameters.
    """

    values: Mapping[int, torch.Tensor]
    version: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PendingAllGather:
    """All-gathers of all parameters of a flat parameter that were started and not yet waited for.

    Attributes:
        messages: For each parameter, its message; of a quantized parameter its elements, then its scales.
        version: Counters that change with the parameters.
    """

    messages: tuple[tuple[torch.Tensor, ...], ...]
    version: tuple[int, ...]


@dataclasses.dataclass
class UpdateState:
    """How far the update of one parameter group is.

    Attributes:
        update: When it is updated, as the specs of its parameters have it.
        open_forwards: Compiled forwards that have read it and whose backward has not run; reads outside of compiled
            graphs count until the update.
        has_new_grads: Whether parameters were given gradients since the last update.
        is_updated: Whether it was updated since the last forward.
        expects_late_grad: Whether code that read a parameter before it was sharded may still send it a gradient.
    """

    update: Update = Update.AFTER_BACKWARD
    open_forwards: int = 0
    has_new_grads: bool = False
    is_updated: bool = False
    expects_late_grad: bool = False
