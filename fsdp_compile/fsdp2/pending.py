"""Gradients that wait for (the rest of) their reduction: those of microbatches, until the last one.

They have one home at a time: here, as one tensor of a group, while graphs gather its unit; in FSDP2's objects, one of
each parameter, from FSDP2's pre-forward until after its post-backward.

    no_sync         backward graph -> accumulator leaf -> `unreduced` [size * numel]
    last one        backward graph takes `unreduced`, adds its own gradients, reduces the sum
    left over       at the end of that backward, for parameters that it made no gradient of

Graphs do not take the pending tensor itself, whose presence and identity Dynamo would guard on, but a tensor of its
shape without memory; the compiled step puts the pending one, or zeros, in its place.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from fsdp_compile._torch import fully_shard as fsdp2
from fsdp_compile._torch import fully_shard_params as torch_params
from fsdp_compile._torch.dynamo import keep_sizes_fixed
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.fsdp2 import edge
from fsdp_compile.fsdp2.updates import deliver
from fsdp_compile.layout.messages import EAGER, full_parameter, gradient_rows
from fsdp_compile.layout.spec import GradPlacement
from fsdp_compile.ops.unshard import sum_over_replicas, sum_over_shards

if TYPE_CHECKING:
    from fsdp_compile.fsdp2.param_group import Param, ParamGroup


@dataclasses.dataclass
class _Sum:
    """A sum of gradients, laid out in slots like the flat buffer, and the slots in which there are any."""

    value: torch.Tensor
    offsets: set[int]


class PendingGrads:
    """The pending gradients of one group.

    Attributes:
        placements: How far gradients have ever been left unreduced; graphs that reduce take these sums from then on.
        leaves: What `leaf` has made.
        blanks: What `blank` has made.
    """

    def __init__(self, group: ParamGroup) -> None:
        self._group = weakref.ref(group)
        self._sums: dict[GradPlacement, _Sum] = {}
        self.leaves: dict[GradPlacement, torch.Tensor] = {}
        self.blanks: dict[GradPlacement, torch.Tensor] = {}
        self.placements: set[GradPlacement] = set()

    @property
    def group(self) -> ParamGroup:
        """The group."""
        group = self._group()
        assert group is not None
        return group

    def __bool__(self) -> bool:
        return bool(self._sums)

    def numel(self, placement: GradPlacement) -> int:
        """Elements of a sum."""
        group = self.group
        return group.flat.numel() * (group.size if placement is GradPlacement.UNREDUCED else 1)

    def dtype(self) -> torch.dtype:
        """Dtype of sums."""
        return self.group.params[0].spec.unreduced_dtype

    def device(self) -> torch.device:
        """Where gradients are computed, and so summed."""
        compute = self.group.params[0].spec.compute
        return torch.device(compute) if compute else self.group.flat.device

    def leaf(self, placement: GradPlacement) -> torch.Tensor:
        """The leaf to which graphs send gradients that they do not reduce; it takes the memory of one element."""
        if placement not in self.leaves:
            with torch.inference_mode(mode=False):
                spec = self.group.params[0].spec
                dtype = spec.unrounded_dtype if placement is GradPlacement.UNREDUCED else spec.unreduced_dtype
                one = torch.zeros(1, dtype=dtype, device=self.device())
                leaf = one.expand(self.numel(placement)).requires_grad_()
            leaf.register_post_accumulate_grad_hook(_Collect(self.group, placement))
            keep_sizes_fixed(leaf)
            self.leaves[placement] = leaf
            self.placements.add(placement)
        return self.leaves[placement]

    def blank(self, placement: GradPlacement) -> torch.Tensor:
        """What graphs take for a sum: its shape, without memory."""
        if placement not in self.blanks:
            with torch.inference_mode(mode=False):
                blank = torch.empty(self.numel(placement), dtype=self.dtype(), device=self.device())
            blank.untyped_storage().resize_(0)
            keep_sizes_fixed(blank)
            self.blanks[placement] = blank
        return self.blanks[placement]

    def add(self, placement: GradPlacement, grad: torch.Tensor, offsets: Collection[int]) -> None:
        """Adds the gradients of one backward."""
        known = self._sums.get(placement)
        if known is None:
            self._sums[placement] = _Sum(grad.to(self.dtype()), set(offsets))
            self.group.unit.model.pending.add(self.group)
            fsdp2.note_unreduced(self.group.of_torch)
        else:
            known.value = (known.value + grad).to(self.dtype())
            known.offsets.update(offsets)

    def offsets(self, placement: GradPlacement) -> set[int]:
        """Offsets of the parameters of which there are sums."""
        known = self._sums.get(placement)
        return set() if known is None else set(known.offsets)

    def take(self, placement: GradPlacement, offsets: Collection[int]) -> torch.Tensor:
        """The sum, or zeros, for a graph that adds to it the gradients of the parameters at some offsets."""
        known = self._sums.get(placement)
        if known is None or known.offsets.isdisjoint(offsets):
            return torch.zeros(self.numel(placement), dtype=self.dtype(), device=self.device())
        taken = known.value
        if known.offsets.issubset(offsets):
            del self._sums[placement]
            return taken
        # Another graph takes the rest, and must not add once more what this one adds.
        known.value = taken.clone()
        for param in self.group.params_at(known.offsets.intersection(offsets)):
            self._slot(known.value, placement, param).zero_()
        known.offsets.difference_update(offsets)
        return taken

    def forget(self) -> None:
        """Drops all sums."""
        self._sums.clear()

    def reduce_rest(self) -> None:
        """Reduces what is left as far as the next forward is asked to, and adds it to `.grad`; all ranks call it."""
        group = self.group
        placement = group.grad_placement()
        if placement is GradPlacement.UNREDUCED:
            return
        unreduced = self._sums.pop(GradPlacement.UNREDUCED, None)
        if unreduced is not None:
            for param in group.params_at(unreduced.offsets):
                rows = self._slot(unreduced.value, GradPlacement.UNREDUCED, param).to(param.spec.reduce_dtype)
                summed = sum_over_shards(rows.reshape(-1), param.spec)
                self._add_in_slot(GradPlacement.REDUCE_SCATTERED, param, summed)
        if placement is not GradPlacement.REDUCED:
            return
        scattered = self._sums.pop(GradPlacement.REDUCE_SCATTERED, None)
        if scattered is None:
            return
        whole = torch.zeros_like(group.flat)
        for param in group.params_at(scattered.offsets):
            slot = slice(param.spec.offset, param.spec.offset + param.spec.extent)
            whole[slot] = sum_over_replicas(scattered.value[slot].to(param.spec.reduce_dtype), param.spec)
        for param, grad in zip(group.params, group.sharded_grads(whole, scattered.offsets), strict=True):
            if grad is not None:
                deliver(param.parameter, grad)
        group.updates.note(group.params_at(scattered.offsets))

    def give_to_torch(self) -> None:
        """Hands unreduced gradients to FSDP2, whose hooks have gathered the unit."""
        self.refuse_partial()
        unreduced = self._sums.pop(GradPlacement.UNREDUCED, None)
        if unreduced is not None:
            for param in self.group.params_at(unreduced.offsets):
                rows = self._slot(unreduced.value, GradPlacement.UNREDUCED, param).reshape(-1)
                full = full_parameter(EAGER, rows, param.spec, start=0, span=param.spec.extent)
                # FSDP2 adds to it in place.
                full = full.clone()
                torch_params.give_unreduced_grad(
                    param.of_torch, full if param.layout is None else param.layout.unreduced(full)
                )

    def take_from_torch(self) -> None:
        """Takes unreduced gradients from FSDP2, after its post-backward."""
        for param in self.group.params:
            grad = torch_params.take_unreduced_grad(param.of_torch)
            if grad is not None:
                rows = gradient_rows(EAGER, grad.to(self.dtype()), param.spec)
                self.placements.add(GradPlacement.UNREDUCED)
                self._add_in_slot(GradPlacement.UNREDUCED, param, rows)

    def refuse_partial(self) -> None:
        """Raises `UnsupportedModelError` for gradients that lack their sum over replicas, which FSDP2 cannot take."""
        if GradPlacement.REDUCE_SCATTERED in self._sums:
            raise self.partial_refusal("a compiled backward", "not compiled")

    def partial_refusal(self, before: str, after: str) -> UnsupportedModelError:
        """The error for gradients that lack their sum over replicas where the next forward cannot take them."""
        return UnsupportedModelError(
            f"gradients of {before} wait for their sum over replicas, and the next forward is {after}",
            where=f"set_requires_all_reduce(False), unit {self.group.title}",
            instead="all microbatches of a step compiled, or none",
        )

    def _add_in_slot(self, placement: GradPlacement, param: Param, rows: torch.Tensor) -> None:
        if placement not in self._sums:
            blank = torch.zeros(self.numel(placement), dtype=self.dtype(), device=self.device())
            self.add(placement, blank, ())
        known = self._sums[placement]
        slot = self._slot(known.value, placement, param)
        slot += rows.view(slot.shape[0], -1).to(self.dtype())
        known.offsets.add(param.spec.offset)

    def _slot(self, value: torch.Tensor, placement: GradPlacement, param: Param) -> torch.Tensor:
        parts, spec = self.group.size if placement is GradPlacement.UNREDUCED else 1, param.spec
        return value.view(parts, -1)[:, spec.offset : spec.offset + spec.extent]


class _Collect:
    """The hook of a leaf that receives gradients which are not fully reduced."""

    def __init__(self, group: ParamGroup, placement: GradPlacement) -> None:
        self._group, self._placement = weakref.ref(group), placement

    @torch.compiler.disable
    def __call__(self, leaf: torch.Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if (group := self._group()) is None:
            return
        # A compiled function makes gradients of parameters that were frozen since, too.
        trained = {param.spec.offset for param in group.params if param.parameter.requires_grad}
        offsets = trained.intersection(edge.take_produced(group))
        if grad is not None and offsets:
            group.pending.add(self._placement, grad, offsets)
