"""Mixed precision: which modules cast inputs and outputs, which are excluded, and whose buffers are cast."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fsdp_compile.config.casts import CastWhen, ForwardCasts, FullPrecision
from fsdp_compile.config.policy import MixedPrecision
from fsdp_compile.modules.buffers import cast_buffers
from fsdp_compile.modules.classes import gather_on_read
from fsdp_compile.runtime.module_state import Nesting, ensure_state, state_of, stored_parameters


@dataclasses.dataclass
class PrecisionPlan:
    """What is to be done to modules before their parameters are sharded.

    Attributes:
        whole: Modules that are excluded: they keep full precision.
        buffers: Modules with buffers to cast, and their policies.
    """

    whole: dict[nn.Module, FullPrecision] = dataclasses.field(default_factory=dict)
    buffers: dict[nn.Module, MixedPrecision] = dataclasses.field(default_factory=dict)

    def add(self, root: nn.Module, precision: MixedPrecision, done: Sequence[nn.Module]) -> None:
        """Plans a policy for the modules of `root`, without those in `done`, which have a policy of their own."""
        apart = {id(m) for other in done for m in other.modules()}
        for module in root.modules():
            if id(module) not in apart and _is_whole(module, precision):
                self.whole.update({m: FullPrecision(_own_dtype(m)) for m in module.modules() if id(m) not in apart})
        if precision.buffer_dtype is not None:
            own = (m for m in root.modules() if id(m) not in apart and not keeps_full_precision(m, self))
            self.buffers.update(dict.fromkeys(own, precision))

    def apply(self) -> None:
        """Marks modules, and casts buffers."""
        for module, casts in self.whole.items():
            ensure_state(module).casts = casts
            gather_on_read(module)
        for module, precision in self.buffers.items():
            assert precision.buffer_dtype is not None
            if cast_buffers(module, precision.buffer_dtype, restore_in_eval=precision.full_precision_in_eval):
                gather_on_read(module)


def keeps_full_precision(module: nn.Module, planned: PrecisionPlan | None = None) -> bool:
    """Whether a module is in one that mixed precision excludes, by now or by a plan."""
    state = state_of(module)
    is_full_precision = state is not None and isinstance(state.casts, FullPrecision)
    return is_full_precision or (planned is not None and module in planned.whole)


def cast_at(module: nn.Module, precision: MixedPrecision, nesting: Nesting) -> None:
    """Sets the casts of a module's inputs and outputs to those of a policy, unless it is excluded."""
    casts_inputs = precision.cast_forward_inputs
    if nesting is Nesting.OUTERMOST and precision.cast_root_forward_inputs is not None:
        casts_inputs = precision.cast_root_forward_inputs
    when = CastWhen.TRAINING if precision.full_precision_in_eval else CastWhen.ALWAYS
    casts = ForwardCasts(precision.param_dtype if casts_inputs else None, precision.output_dtype, when)
    state = ensure_state(module)
    if isinstance(state.casts, FullPrecision):
        return
    if casts.inputs is not None or casts.output is not None or state.casts is not None:
        state.casts = casts
        gather_on_read(module)


def any_full_precision(modules: Iterable[nn.Module], planned: PrecisionPlan | None = None) -> bool:
    """Whether some of the modules that register a parameter is excluded."""
    return any(keeps_full_precision(module, planned) for module in modules)


def _is_whole(module: nn.Module, precision: MixedPrecision) -> bool:
    asked = (precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype, precision.gather_dtype)
    return any(each is not None for each in asked) and isinstance(module, precision.full_precision_classes)


def _own_dtype(module: nn.Module) -> torch.dtype:
    values = itertools.chain(stored_parameters(module), module.buffers())
    return next((t.dtype for t in values if t.is_floating_point()), torch.float32)
