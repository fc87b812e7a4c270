"""`backward(inputs=...)` and `autograd.grad()` of sharded parameters.

Autograd ends at flat parameters, and the sharded ones are views that no forward has read. So it is asked for the flat
parameters, too, and what they get is given to those sharded ones alone that were asked for. What the loss adds outside
of the forward (a penalty) has read the sharded ones themselves, so both are asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.autograd import RunBackward, replace_inputs_of_backwards
from fsdp_compile._torch.tensors import is_batched, make_dtensor
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.layout.spec import GradPlacement, Update
from fsdp_compile.runtime import gradients
from fsdp_compile.runtime.replaced_params import current
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup


@functools.cache
def follow_backwards() -> None:
    """Makes every backward of the process that asks for some gradients alone find those of sharded parameters."""
    replace_inputs_of_backwards(choose)


def choose(inputs: Sequence[object]) -> Chosen | None:
    """What takes the place of the inputs of a backward; `None` if no sharded parameter is among them."""
    if not any(isinstance(value, DTensor) for value in inputs):
        return None
    asked = [current(value) if isinstance(value, DTensor) else value for value in inputs]
    groups = [group for group in FSDPParamGroup.alive() if not group.is_replaced]
    known: dict[object, tuple[FSDPParamGroup, FSDPParam]] = {p.parameter: (g, p) for g in groups for p in g.params}
    places = tuple(known.get(value) if isinstance(value, DTensor) else None for value in asked)
    return Chosen(tuple(asked), places) if any(places) else None


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Inputs of a backward, with sharded parameters among them.

    Attributes:
        inputs: As they were given.
        places: For each that is a sharded parameter, its group and itself.
    """

    inputs: tuple[object, ...]
    places: tuple[tuple[FSDPParamGroup, FSDPParam] | None, ...]

    @functools.cached_property
    def offsets(self) -> Mapping[FSDPParamGroup, set[int]]:
        """Where the parameters that are asked for lie in each group."""
        found: dict[FSDPParamGroup, set[int]] = {}
        for group, param in filter(None, self.places):
            found.setdefault(group, set()).add(param.spec.offset)
        return found

    def run(
        self, backward: RunBackward, grads_of_outputs: Sequence[object], *, accumulates: bool, allows_unused: bool
    ) -> tuple[torch.Tensor | None, ...]:
        """Runs a backward; returns the gradients of the inputs if it does not accumulate them.

        Args:
            backward: Called with the leaves of autograd, of which some may get no gradient.
            grads_of_outputs: What the backward starts with.
            accumulates: Whether gradients go to `.grad`.
            allows_unused: Whether some inputs may have no gradient.
        """
        if any(isinstance(value, torch.Tensor) and is_batched(value) for value in grads_of_outputs):
            raise _refusal(self._first, "several at once", "torch.autograd.grad(..., is_grads_batched=True)")
        for group in self.offsets:
            _refuse_waiting(group)
        flats = [group.flat_param for group in self.offsets]
        # Reads under `no_sync` send gradients to these, which is found out by their being reached.
        held = [leaf for group in self.offsets for leaf in group.grads.accumulators.values()]
        try:
            for group, offsets in self.offsets.items():
                group.grads.wanted = frozenset(offsets)
            made = backward((*self.inputs, *flats, *held))
        finally:
            for group in self.offsets:
                group.grads.wanted = None
        if accumulates:
            return ()
        direct, reduced = made[: len(self.inputs)], made[len(self.inputs) :]
        if any(gradient is not None for gradient in reduced[len(flats) :]):
            raise refusal_of_unreduced(self._first)
        of_groups = dict(zip(self.offsets, reduced, strict=False))
        return self._results(direct, of_groups, allows_unused=allows_unused)

    @property
    def _first(self) -> FSDPParam:
        return next(param for _, param in filter(None, self.places))

    def _results(
        self,
        direct: Sequence[torch.Tensor | None],
        of_groups: Mapping[FSDPParamGroup, torch.Tensor | None],
        *,
        allows_unused: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        produced = {
            group: set() if gradient is None else group.grads.take_produced(GradPlacement.REDUCED, in_last=True)
            for group, gradient in of_groups.items()
        }
        for group in of_groups:
            group.grads.forget_use()
        found = []
        for place, own in zip(self.places, direct, strict=True):
            gradient = None if place is None else of_groups[place[0]]
            if place is None or gradient is None or place[1].spec.offset not in produced[place[0]]:
                found.append(own)
                continue
            group, param = place
            gradients.refuse_double_backward(group, gradient)
            if own is not None and param.parameter._backward_hooks:
                raise gradients.refusal_of_parts(param)
            part = gradients.through_hooks(param, make_dtensor(gradients.part_of(param, gradient), param.dtensor))
            whole = part if own is None else part + own
            found.append(whole if param.grad_dtype is None else whole.to(param.grad_dtype))
        if not allows_unused and any(gradient is None for gradient in found):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
                "if this is the desired behavior."
            )
        return tuple(found)


def _refuse_waiting(group: FSDPParamGroup) -> None:
    """Raises `UnsupportedModelError` if gradients of a group go elsewhere than to `.grad`, all of them together."""
    settings, param = group.unit.comm_settings, group.params[0]
    is_unreduced = not (settings.reduce_gradients and settings.all_reduce and settings.last_backward)
    if is_unreduced or group.has_pending_grads:
        raise refusal_of_unreduced(param)
    if group.update_state.update is Update.IN_BACKWARD:
        raise _refusal(param, "in a backward that updates all of a unit", "step_in_backward()")


def refusal_of_unreduced(param: FSDPParam) -> UnsupportedModelError:
    """The error for gradients of a part of a unit while those of the unit wait for the rest of their reduction."""
    return _refusal(param, "while gradients of its unit are accumulated without a reduction", "no_sync()")


def _refusal(param: FSDPParam, how: str, where: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the gradients of some sharded parameters alone are asked for, {how}",
        where=f"backward(inputs=...) or torch.autograd.grad(), {where}, parameter {param.name}",
        instead="loss.backward(), and p.grad = None for the others after it, or requires_grad_(False) before the "
        "forward",
    )
