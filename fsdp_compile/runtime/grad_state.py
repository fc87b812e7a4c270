"""Gradients of one parameter group between backward and `.grad`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch

from fsdp_compile._torch.autograd import backward_in_progress, outer_backwards
from fsdp_compile.layout.spec import GradPlacement, UnshardSpec


@dataclasses.dataclass
class AccumulatedGrad:
    """Accumulated gradients of some parameters of one group.

    Attributes:
        value: `[parts * numel]`, rank after rank, each part the rows of one rank; one part for partial results.
        offsets: The parameters that have gradients in it.
        consumed: Parameters whose gradients are still in `value` and no longer count.
    """

    value: torch.Tensor
    offsets: set[int]
    consumed: set[int] = dataclasses.field(default_factory=set)


class PendingGrads:
    """Accumulated gradients of one parameter group that wait for the next stage of their reduction.

    They stay until the backward of a graph that reads them consumes them, so that a forward whose loss is thrown away
    loses nothing. Each parameter's is consumed once: a second backward through a graph counts nothing twice.

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
        """Whether there are any, or some were consumed and are not committed."""
        return self._grad is not None or bool(self._uncommitted)

    @property
    def uncommitted(self) -> set[int]:
        """The parameters whose gradients were consumed and are not committed."""
        return set().union(*(offsets for _, offsets in self._uncommitted))

    @property
    def value(self) -> torch.Tensor | None:
        """The accumulated gradient, for a graph to read."""
        return None if self._grad is None else self._grad.value

    def add(self, gradient: torch.Tensor, offsets: Iterable[int], without: Iterable[int] = ()) -> None:
        """Accumulates `gradient`, `[parts * numel]`, zero but for the parameters at `offsets` and at `without`."""
        gradient, pending = self._without(gradient, without), self._grad
        if pending is None:
            self._grad = AccumulatedGrad(gradient, set(offsets))
        else:
            # Not in place: a graph may have read the old value, to add it to its own gradient before it reduces both.
            value = self._without(pending.value, pending.consumed) + gradient
            self._grad = AccumulatedGrad(value, pending.offsets | set(offsets))

    def consume(self, borrowed: torch.Tensor, offsets: Iterable[int]) -> torch.Tensor:
        """Takes gradients out, for a graph that adds them to its own before it reduces both.

        Args:
            borrowed: The value that the graph's forward read; if gradients were added since, nothing is consumed.
            offsets: The parameters that the graph reduces.

        Returns:
            A tensor like `borrowed`: the gradients of these parameters, zeros for those that were consumed before.
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
        """Records that consumed gradients have been reduced."""
        self._uncommitted.clear()

    def roll_back(self) -> bool:
        """Makes consumed gradients that were never reduced pending again; returns whether there were any."""
        # `torch.autograd.grad` drops the gradients that it was not asked for.
        lost, self._uncommitted = self._uncommitted, []
        for value, offsets in lost:
            if self._grad is not None and self._grad.value is value:
                self._grad.offsets |= offsets
                self._grad.consumed -= offsets
            else:
                self.add(self._without(value, self._specs.keys() - offsets), offsets)
        return bool(lost)

    def drain(self) -> AccumulatedGrad | None:
        """Returns all pending gradients, and clears them."""
        pending, self._grad = self._grad, None
        return pending and AccumulatedGrad(self._without(pending.value, pending.consumed), pending.offsets)

    def clear(self) -> None:
        """Drops everything."""
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


class GradState:
    """The gradients of one parameter group.

    Attributes:
        pending: Accumulated gradients that wait for the next stage of their reduction, by the stage that they have
            reached. A stage that nothing has asked for is not in it.
        accumulators: The leaves that autograd accumulates such gradients into.
        unwritten: Offsets of parameters whose gradients are in the flat parameter's `.grad` and not yet in their own.
        wanted: Offsets of those that the running backward is asked for; `None` for all.
        unused: Offsets of those whose gradients are zero in the compiled backward that runs, since the loss uses no
            output that depends on them.
        used: Offsets of those that got gradients which are not written yet, and are no such zeros.
        zeros: Offsets of those that got such zeros which are not written yet.
        droppable: Gradients, by offset, that became `.grad`s in this backward and are such zeros on this rank, with
            their versions.
        unused_by_all: While a compiled backward runs: offsets of those that no rank's loss uses; `None` if no rank has
            asked.
    """

    def __init__(self, specs: Sequence[UnshardSpec]) -> None:
        self._specs = specs
        self.pending: dict[GradPlacement, PendingGrads] = {}
        self.accumulators: dict[GradPlacement, torch.Tensor] = {}
        self.unwritten: set[int] = set()
        self.wanted: frozenset[int] | None = None
        self.unused: frozenset[int] = frozenset()
        self.droppable: dict[int, tuple[torch.Tensor, int]] = {}
        self.unused_by_all: frozenset[int] | None = None
        self.used: set[int] = set()
        self.zeros: set[int] = set()
        self._all = frozenset(spec.offset for spec in specs)
        self._produced: dict[GradPlacement, set[int]] = {}
        self._produced_in = -1
        self._produced_outside: dict[int, dict[GradPlacement, set[int]]] = {}

    def stage(self, reached: GradPlacement) -> PendingGrads:
        """The gradients that are reduced so far, and no further."""
        if reached not in self.pending:
            parts = self._specs[0].size if reached is GradPlacement.UNREDUCED else 1
            self.pending[reached] = PendingGrads(self._specs, parts)
        return self.pending[reached]

    @property
    def unsharded_accumulated_grad(self) -> PendingGrads:
        """Unsharded gradients that wait for their reduce-scatter."""
        return self.stage(GradPlacement.UNREDUCED)

    @property
    def partial_reduce_output(self) -> PendingGrads:
        """Reduce-scattered gradients that wait for their all-reduce over replicas."""
        return self.stage(GradPlacement.REDUCE_SCATTERED)

    @property
    def consumed(self) -> set[int]:
        """Offsets of those that the running backward adds accumulated gradients to."""
        return set().union(*(grads.uncommitted for grads in self.pending.values()))

    @property
    def is_pending(self) -> bool:
        """Whether gradients wait for a stage of their reduction, or were consumed and are not committed."""
        return bool(self.pending) and any(grads.is_pending for grads in self.pending.values())

    def mark_produced(self, offsets: Iterable[int], placement: GradPlacement) -> None:
        """Records which parameters the gradient that autograd is about to accumulate covers; the others get none."""
        backward = backward_in_progress()
        if self._produced_outside or outer_backwards:
            self._turn_to(backward)
        elif self._produced_in != backward:
            # `torch.autograd.grad` with respect to inputs makes gradients that are never accumulated: forget them.
            self._produced, self._produced_in = {}, backward
        self._produced.setdefault(placement, set()).update(offsets)
        if self.unused:
            self.note_use(offsets)
        else:  # this runs for each group in each backward, so without a call
            self.used.update(offsets)

    def _turn_to(self, backward: int) -> None:
        """Makes `_produced` that of a backward, which may have been called by another one or have called one."""
        if backward == self._produced_in:
            return
        before = {**self._produced_outside, self._produced_in: self._produced}
        self._produced, self._produced_in = before.pop(backward, {}), backward
        self._produced_outside = {number: made for number, made in before.items() if number in outer_backwards}

    def note_use(self, offsets: Iterable[int]) -> None:
        """Records that parameters get gradients which are not written yet, zeros for those that are `unused`."""
        self.zeros |= self.unused.intersection(offsets)
        self.used |= set(offsets) - self.unused

    def take_zeros(self, offsets: Iterable[int]) -> set[int]:
        """Of the parameters at `offsets`, which are about to be written, those that got nothing but such zeros."""
        written = set(offsets)
        found = (self.zeros & written) - self.used
        self.zeros -= written
        self.used -= written
        return found

    def begin_unused(self, offsets: frozenset[int]) -> None:
        """Begins a compiled backward whose gradients at `offsets` are such zeros."""
        # Gradients of an earlier backward that were never accumulated were of inputs, by `torch.autograd.grad`.
        is_new = self._produced_in != backward_in_progress() and not outer_backwards
        if is_new and not self.unwritten and not self.is_pending:
            self.forget_use()
        # What ranks found at the end of an earlier backward says nothing of this one.
        self.unused, self.unused_by_all = offsets, None

    def forget_use(self, offsets: Iterable[int] | None = None) -> None:
        """Forgets what `note_use` has recorded, of gradients that are not written: of all, or of some parameters."""
        gone = self._all if offsets is None else offsets
        self.used.difference_update(gone)
        self.zeros.difference_update(gone)

    def take_produced(self, placement: GradPlacement, *, in_last: bool = False) -> set[int]:
        """The parameters that `mark_produced` named since the last call; all, with a warning, if it was not called.

        Args:
            placement: How far the gradients are reduced.
            in_last: Takes those of the last backward that made any, which is over, and not of the one that runs.
        """
        if self._produced_outside and not in_last:
            self._turn_to(backward_in_progress())
        produced = self._produced.pop(placement, None)
        if produced is None and self._produced_in == backward_in_progress():
            # All gradients of this backward are reduced less far, and autograd calls a leaf's hook for none as well.
            return set()
        if produced is None:
            # Saved-tensor hooks gave backward values that are those of no group, or of several.
            warnings.warn(
                "hooks on saved tensors gave backward other values than a flat parameter has: gradients of all of its "
                "parameters were computed with them. Let the hooks return tensors that are leaves as they are.",
                stacklevel=2,
            )
            self.used |= self._all
            return set(self._all)
        return produced

    def commit(self) -> None:
        """Records that consumed gradients have been reduced."""
        for grads in self.pending.values():
            grads.commit()

    def roll_back(self) -> bool:
        """Makes consumed gradients that were never reduced pending again; returns whether there were any."""
        # A list: `any` of a generator would leave the second stage out.
        rolled_back = [grads.roll_back() for grads in self.pending.values()]
        return any(rolled_back)

    def clear(self) -> None:
        """Drops all gradients that have not reached the parameters."""
        for grads in self.pending.values():
            grads.clear()
        self.unwritten.clear()
        self.forget_use()
