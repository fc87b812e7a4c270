"""State of one parameter group that knows no group: gradients, gathered parameters, updates, settings."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping

import torch

from fsdp_compile.layout.spec import ReadSpec, Update


@dataclasses.dataclass
class Accumulation:
    """What the next forward and backward passes do with gradients and parameters; users change it between steps.

    Attributes:
        reduce_gradients: Whether gradients are summed over ranks at all.
        all_reduce: Whether they are summed over replicas.
        last_backward: Whether the next backward hands gradients over to the parameters.
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


class Origin(enum.Enum):
    """Why a unit exists."""

    CALL = "call"
    """A person chose it: `fully_shard` was called on its root module, or a wrap policy named it."""
    SPLIT = "split"
    """The automatic split of a larger model made it."""


class ReduceQueue(enum.Enum):
    """Which process group reduce-scatters gradients; collectives of one group wait for each other."""

    SHARED = "shared"
    """The one that gathers parameters."""
    OWN = "own"
    """A second one of the same ranks."""


class Holding(enum.Enum):
    """What the modules of a unit hold."""

    SHARDS = "shards"
    """DTensors, views of the unit's flat shards."""
    FULL = "full"
    """Plain, full parameters, inside of `full_params`."""


@dataclasses.dataclass
class HeldGradient:
    """Gradients of some slots of one flat shard.

    Attributes:
        value: `[parts * numel]`: rank after rank, each with the rows that it will keep; one part for partial results.
        offsets: The slots that have gradients in it.
        taken: Slots whose gradients are still in `value` and no longer count.
    """

    value: torch.Tensor
    offsets: set[int]
    taken: set[int] = dataclasses.field(default_factory=set)


class HeldGradients:
    """The place of one flat shard's held gradients.

    Args:
        specs: The slots.
        parts: Into how many parts of the flat shard's size the value is divided.
    """

    def __init__(self, specs: Iterable[ReadSpec], parts: int) -> None:
        self._specs: Mapping[int, ReadSpec] = {spec.offset: spec for spec in specs}
        self._parts = parts
        self._held: HeldGradient | None = None
        self._unconfirmed: list[tuple[torch.Tensor, set[int]]] = []

    def __bool__(self) -> bool:
        return self._held is not None

    @property
    def owes(self) -> bool:
        """Whether something is held, or was taken and has not arrived."""
        return self._held is not None or bool(self._unconfirmed)

    @property
    def value(self) -> torch.Tensor | None:
        """What is held, for a graph to borrow."""
        return None if self._held is None else self._held.value

    def add(self, gradient: torch.Tensor, offsets: Iterable[int]) -> None:
        """Accumulates a gradient that covers the slots at `offsets`, and is zero elsewhere.

        Args:
            gradient: `[parts * numel]`, in the dtype of reductions; it is kept.
            offsets: Slots of the flat shard.
        """
        held = self._held
        if held is None:
            self._held = HeldGradient(gradient, set(offsets))
        else:
            value = self._without(held.value, held.taken) + gradient
            self._held = HeldGradient(value, held.offsets | set(offsets))

    def take(self, borrowed: torch.Tensor, offsets: Iterable[int]) -> torch.Tensor:
        """Gives away what is held of some slots.

        Args:
            borrowed: What the taker was given when its forward ran; if something was added since, nothing is taken.
            offsets: Slots that the taker reduces; it does not look at others.

        Returns:
            A tensor like `borrowed`: the gradients of these slots, zeros for those that were taken before.
        """
        held, wanted = self._held, set(offsets)
        if held is None or held.value.data_ptr() != borrowed.data_ptr():
            return torch.zeros_like(borrowed)
        value = self._without(borrowed, wanted & held.taken)
        self._unconfirmed.append((held.value, wanted & held.offsets))
        held.taken |= wanted & held.offsets
        held.offsets -= wanted
        if not held.offsets:
            self._held = None
        return value

    def confirm(self) -> None:
        """Notes that what was taken has arrived where it was to go."""
        self._unconfirmed.clear()

    def give_back(self) -> bool:
        """Holds again what was taken and never arrived: `torch.autograd.grad` drops gradients that nobody asked for.

        Returns:
            Whether there was anything.
        """
        lost, self._unconfirmed = self._unconfirmed, []
        for value, offsets in lost:
            if self._held is not None and self._held.value is value:
                self._held.offsets |= offsets
                self._held.taken -= offsets
            else:
                self.add(self._without(value, self._specs.keys() - offsets), offsets)
        return bool(lost)

    def take_all(self) -> HeldGradient | None:
        """Gives away everything."""
        held, self._held = self._held, None
        return held and HeldGradient(self._without(held.value, held.taken), held.offsets)

    def clear(self) -> None:
        """Forgets everything."""
        self._held = None
        self._unconfirmed.clear()

    def _without(self, value: torch.Tensor, offsets: Iterable[int]) -> torch.Tensor:
        """`value` with zeros in the slots at `offsets`."""
        gone = [self._specs[offset] for offset in offsets]
        if not gone:
            return value
        rows = value.view(self._parts, -1).clone()
        for spec in gone:
            rows[:, spec.offset : spec.offset + spec.extent] = 0
        return rows.view(-1)


@dataclasses.dataclass(frozen=True)
class KeptParameters:
    """Full parameters, and the moment at which they were those of the flat shard.

    Attributes:
        values: The full parameter of each slot, by offset.
        stamp: Counters that change with the parameters.
    """

    values: Mapping[int, torch.Tensor]
    stamp: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RunningGather:
    """All-gathers of all slots of a flat shard that were started and not yet waited for.

    Attributes:
        messages: For each slot, its message; of a quantized parameter its elements, then its scales.
        stamp: Counters that change with the parameters.
    """

    messages: tuple[tuple[torch.Tensor, ...], ...]
    stamp: tuple[int, ...]


@dataclasses.dataclass
class Progress:
    """How far the update of one flat shard is.

    Attributes:
        update: When it is updated, as the specs of its slots have it.
        readers: Compiled forwards that have read it and whose backward has not run; reads outside of compiled graphs
            count until the update.
        is_due: Whether parameters were given gradients since the last update.
        is_done: Whether it was updated since the last forward.
        has_late: Whether code that read a parameter before it was sharded may still send it a gradient.
    """

    update: Update = Update.AFTER_BACKWARD
    readers: int = 0
    is_due: bool = False
    is_done: bool = False
    has_late: bool = False
