"""What reads of a parameter group take besides it: which gradients, which gathered values.

By default nothing. While gradients are held back, a leaf that they go to; once some are held, the held ones, which
backward adds to its own before it reduces both; while parameters stay gathered, their full values. Each combination is
a graph of its own, compiled once: Dynamo guards on the text of a read and on which tensors are there, not on them.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from fsdp_compile.layout.spec import GradPlacement
from fsdp_compile.runtime import pending
from fsdp_compile.runtime.units import UNSHARD_ARGS, FSDPParamGroup

UnshardArgs = tuple[str, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Arguments of a read besides the parameter group: `variants.py`."""


def set_unshard_args(module: nn.Module, name: str, args: UnshardArgs | None) -> None:
    """Sets what reads of a parameter take besides the parameter group, or that they take nothing."""
    variants = {**module.__dict__.get(UNSHARD_ARGS, {}), name: args}
    present = {n: v for n, v in variants.items() if v is not None}
    if present:
        object.__setattr__(module, UNSHARD_ARGS, present)
    elif UNSHARD_ARGS in module.__dict__:
        object.__delattr__(module, UNSHARD_ARGS)


def refresh_unshard_args(group: FSDPParamGroup) -> None:
    """Makes the next reads of a parameter group what its unit asks for now."""
    pending.mark_pending(group)
    placement = grad_placement_of(group)
    into = None if placement is GradPlacement.REDUCED else group.grad_accumulators[placement]
    accumulated = None if placement is GradPlacement.UNREDUCED else group.unsharded_accumulated_grad.value
    partial = group.partial_reduce_output.value if placement is GradPlacement.REDUCED else None
    is_default = (
        placement is GradPlacement.REDUCED
        and accumulated is None
        and partial is None
        and group.unsharded_params is None
    )
    for param in group.params:
        args = None
        if not is_default:
            unsharded = None if group.unsharded_params is None else group.unsharded_params.values[param.spec.offset]
            args = (
                dataclasses.replace(param.spec, grad_placement=placement).text,
                unsharded,
                into,
                accumulated,
                partial,
            )
        for module, attribute in param.module_refs:
            set_unshard_args(module, attribute, args)


def grad_placement_of(group: FSDPParamGroup) -> GradPlacement:
    """Over which ranks the gradients of a flat parameter are summed now; frozen ones have none to hold back."""
    return group.unit.grad_placement if group.flat_param.requires_grad else GradPlacement.REDUCED
