"""Which modules cast their inputs and outputs, which are kept in full precision, whose buffers are cast."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from fsdp_compile.config.policy import MixedPrecision
from fsdp_compile.modules.casts import CastWhen, ForwardCasts, FullPrecision, cast_buffers
from fsdp_compile.modules.classes import gather_on_read
from fsdp_compile.modules.forward import FORWARD_CASTS
from fsdp_compile.runtime.module_state import Nesting


def cast_at(module: nn.Module, precision: MixedPrecision, nesting: Nesting) -> None:
    """Lets a module cast its inputs and outputs as a policy says, unless it is kept in full precision."""
    casts = precision.cast_forward_inputs
    if nesting is Nesting.OUTERMOST and precision.cast_root_forward_inputs is not None:
        casts = precision.cast_root_forward_inputs
    when = CastWhen.TRAINING if precision.full_precision_in_eval else CastWhen.ALWAYS
    boundary = ForwardCasts(precision.param_dtype if casts else None, precision.output_dtype, when)
    if isinstance(module.__dict__.get(FORWARD_CASTS), FullPrecision):
        return
    if boundary.inputs is not None or boundary.output is not None or FORWARD_CASTS in module.__dict__:
        object.__setattr__(module, FORWARD_CASTS, boundary)
        gather_on_read(module, {})


def keep_full_precision(root: nn.Module, precision: MixedPrecision, sharded_below: Sequence[nn.Module]) -> None:
    """Marks the modules below `root` whose parameters keep their dtype, and casts the buffers of all others.

    Args:
        root: The module that is being sharded, before its units are made.
        precision: Its policy.
        sharded_below: Modules in it that an earlier call sharded: they have their own policy.
    """
    settled = {id(m) for done in sharded_below for m in done.modules()}
    for module in list(root.modules()):
        if id(module) not in settled and _is_whole(module, precision):
            for part in module.modules():
                if id(part) not in settled:
                    object.__setattr__(part, FORWARD_CASTS, FullPrecision(_own_dtype(part)))
                    gather_on_read(part, {})
    if precision.buffer_dtype is None:
        return
    for module in root.modules():
        if id(module) in settled or isinstance(module.__dict__.get(FORWARD_CASTS), FullPrecision):
            continue
        if cast_buffers(module, precision.buffer_dtype, restore_in_eval=precision.full_precision_in_eval):
            gather_on_read(module, {})


def _is_whole(module: nn.Module, precision: MixedPrecision) -> bool:
    asked = (precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype)
    return asked != (None, None, None) and isinstance(module, precision.full_precision_classes)


def _own_dtype(module: nn.Module) -> torch.dtype:
    held = itertools.chain(module.parameters(), module.buffers())
    return next((t.dtype for t in held if t.is_floating_point()), torch.float32)
