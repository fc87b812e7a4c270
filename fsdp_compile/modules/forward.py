"""Whether code runs inside the forward of a sharded module that nobody compiles: there, reads gather by themselves."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import torch
from torch import nn

from fsdp_compile._torch.dynamo import skip_code
from fsdp_compile.modules.casts import Arguments, ForwardCasts, FullPrecision, cast_inputs, cast_output

_forward_depth = threading.local()
_first_call = threading.local()


def in_forward() -> bool:
    """Whether this thread is inside the forward of a sharded module that runs eagerly."""
    return getattr(_forward_depth, "value", 0) > 0 or _in_first_call()


def in_forward_until_return(frame: types.FrameType | None) -> None:
    """Counts as inside a forward until `frame` returns.

    The first call of a plain model entered its forward before there was anything sharded, so nothing has raised the
    depth for what is left of it.
    """
    _first_call.frame = frame


def _in_first_call() -> bool:
    waited_for = getattr(_first_call, "frame", None)
    if waited_for is None:
        return False
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame is not waited_for:
        frame = frame.f_back
    if frame is None:
        _first_call.frame = None
    return frame is not None


def call_in_forward(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `function` so that reads of managed parameters in it gather."""
    _forward_depth.value = getattr(_forward_depth, "value", 0) + 1
    try:
        return function(*args, **kwargs)
    finally:
        _forward_depth.value -= 1


skip_code(call_in_forward.__code__)
FORWARD_CASTS = "_fsdp_boundary"
"""Attribute of a module whose inputs and outputs are cast: its `ForwardCasts` or `FullPrecision`."""
OWN_FORWARD = "_fsdp_own_forward"


def _forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN003, ANN202
    if not torch.compiler.is_compiling():
        return run_eagerly(self, args, kwargs)
    return _trace(self, self._fsdp_original_forward, args, kwargs)


def _own_forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN003, ANN202
    if not torch.compiler.is_compiling():
        return run_eagerly(self, args, kwargs, own=True)
    return _trace(self, self._fsdp_own_forward, args, kwargs)


def _trace(self, forward, args, kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    boundary = self.__dict__.get(FORWARD_CASTS)
    if boundary is None:
        return forward(*args, **kwargs)
    cast_args, cast_kwargs = cast_inputs(boundary, self, (args, kwargs))
    return cast_output(boundary, (args, kwargs), forward(*cast_args, **cast_kwargs))


def run_eagerly(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, own: bool = False) -> Any:
    """Runs a forward around or below which compiled graphs may start: the class's, or the instance's own."""
    outermost = not in_forward()
    if outermost:
        before_step(module)
    boundary: ForwardCasts | FullPrecision | None = module.__dict__.get(FORWARD_CASTS)
    given: Arguments = (args, kwargs)
    if boundary is not None:
        args, kwargs = torch.compiler.disable(cast_inputs)(boundary, module, given)
    if own:
        forward = getattr(module, OWN_FORWARD)
    else:
        forward = module._fsdp_outermost_forward if outermost else module._fsdp_original_forward
    output = call_in_forward(forward, args, kwargs)
    return output if boundary is None else torch.compiler.disable(cast_output)(boundary, given, output)


# Dynamo must not make these frames graphs of their own: run eagerly they raise the depth that eager reads look at, and
# the user's forward below them is compiled. Inlined from another frame, `_forward` is traced like any function.
skip_code(_forward.__code__)
skip_code(_own_forward.__code__)
skip_code(run_eagerly.__code__)


@torch.compiler.disable
def before_step(module: nn.Module) -> None:
    """Restores the parameters below `module` that are no longer views of their flat parameters."""
    from fsdp_compile.runtime import unshard
    from fsdp_compile.sharding import views  # they lay units out anew, which needs this module

    unshard.before_forward(views.units_with_intact_views(module))
