"""Gradients that wait for their reduction: accumulated here by backward passes that do not communicate.

A held tensor is never changed in place, since graphs may have borrowed it: one that adds it to its own gradient before
reducing both. What was borrowed stays held until such a graph's backward takes it, so that a forward whose loss is
thrown away loses nothing; and each slot is taken once, so that a second backward through a graph counts nothing twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch

from fsdp_compile.parameters.spec import ReadSpec


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
