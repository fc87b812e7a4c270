"""What a module's code gets when it says `self.weight`.

The class of a module that holds managed parameters is replaced by a cached subclass with one property per parameter.
Inside `forward` the property gathers the full value; anywhere else it is the DTensor parameter, so that
initialization, checkpoints and in-place writes work on what is stored.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map

from fsdp_compile._torch import skip_code
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.parameters import ops  # noqa: F401  registers fsdp::unshard
from fsdp_compile.parameters.flat import FlatShard
from fsdp_compile.parameters.saving import give_storages
from fsdp_compile.parameters.unit import Unit

Read = tuple[nn.Parameter, str, FlatShard]

READS = "_fsdp_reads"
"""Attribute of a sharded module: parameter name to (flat shard's leaf, text of its `ReadSpec`, flat shard)."""
PRECISION = "_fsdp_precision"
"""Attribute of a module on which a mixed-precision policy was set, to cast its inputs and outputs."""
_UNITS_BELOW = "_fsdp_units_below"
_layouts = [0]
"""How often anything was laid out, so that what modules remember of it can be told stale."""
_classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}
_forward_depth = threading.local()
_first_call = threading.local()


def gather_on_read(module: nn.Module, reads: Mapping[str, Read]) -> None:
    """Makes `module` gather the named parameters, besides those it gathers already, when its forward reads them.

    Args:
        module: The module; its class is replaced by a subclass.
        reads: For each parameter name, the leaf that it is gathered from, the text of its `ReadSpec`, the flat shard.
    """
    reads = {**module.__dict__.get(READS, {}), **reads}
    _layouts[0] += 1
    original = original_class(module)
    object.__setattr__(module, READS, reads)
    key = (original, tuple(sorted(reads)))
    if key not in _classes:
        _classes[key] = _make_class(*key)
    module.__class__ = _classes[key]


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user wrote."""
    return getattr(type(module), "_fsdp_original_class", type(module))


def _make_class(original: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    # Each subclass has its own function object for the signature, over one code object for Dynamo's skip list.
    forward = types.FunctionType(_forward.__code__, _forward.__globals__, "forward")
    functools.update_wrapper(forward, original.forward)
    members: dict[str, Any] = {name: _read_property(name) for name in names}
    members |= {
        "forward": forward,
        "__deepcopy__": _refuse_deepcopy,
        "_save_to_state_dict": _save_to_state_dict,
        "_fsdp_original_class": original,
        "_fsdp_original_forward": original.forward,
        "_fsdp_outermost_forward": _outermost_forward(original),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    return type(original.__name__, (original,), members)


def _outermost_forward(original: type[nn.Module]) -> Callable[..., Any]:
    """The forward of a module that is compiled by itself.

    Dynamo never starts a graph in torch's own layers, it only inlines them. So where the user compiles a plain
    `nn.Sequential`, say, a function of ours is where the graph starts: one code object per class, as Dynamo keeps its
    compiled graphs by code object.
    """
    if not original.forward.__module__.startswith("torch.nn."):
        return original.forward
    code = _call_original.__code__.replace(co_name=f"forward of {original.__name__}")
    return types.FunctionType(code, _call_original.__globals__)


def _call_original(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN003, ANN202
    return self._fsdp_original_forward(*args, **kwargs)


def _read_property(name: str) -> property:
    def read(module: nn.Module) -> torch.Tensor | None:
        if torch.compiler.is_compiling() or in_forward():
            entry = getattr(module, READS)[name]
            return torch.ops.fsdp.unshard(entry[0], entry[1])
        if name not in module._parameters:  # deleted by the user
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
        return module._parameters[name]

    return property(read)


def _save_to_state_dict(module: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001  torch's
    original_class(module)._save_to_state_dict(module, destination, prefix, keep_vars)
    if not keep_vars:
        reads: dict[str, Read] = getattr(module, READS)
        give_storages(module, destination, prefix, [(name, flat) for name, (_, _, flat) in reads.items()])


def _refuse_deepcopy(module: nn.Module, _memo: dict[int, Any]) -> nn.Module:
    raise UnsupportedModelError(
        "a sharded module cannot be deep-copied: the copy would share process groups and flat shards with it",
        where=type(module).__name__,
        instead="copy.deepcopy(model) before it is sharded, and move values with state_dict() and load_state_dict()",
    )


def _forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN003, ANN202
    if not torch.compiler.is_compiling():
        return run_eagerly(self, args, kwargs)
    precision = self.__dict__.get(PRECISION)
    if precision is None:
        return self._fsdp_original_forward(*args, **kwargs)
    args, kwargs = cast_inputs(precision, args, kwargs)
    return cast_output(precision, self._fsdp_original_forward(*args, **kwargs))


def run_eagerly(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a forward around or below which compiled graphs may start."""
    outermost = not in_forward()
    if outermost:
        before_step(module)
    precision = module.__dict__.get(PRECISION)
    if precision is not None:
        args, kwargs = torch.compiler.disable(cast_inputs)(precision, args, kwargs)
    forward = module._fsdp_outermost_forward if outermost else module._fsdp_original_forward
    output = call_in_forward(forward, args, kwargs)
    return output if precision is None else torch.compiler.disable(cast_output)(precision, output)


# Dynamo must not make these frames graphs of their own: run eagerly they raise the depth that eager reads look at, and
# the user's forward below them is compiled. Inlined from another frame, `_forward` is traced like any function.
skip_code(_forward.__code__)
skip_code(run_eagerly.__code__)


@torch.compiler.disable
def before_step(module: nn.Module) -> None:
    """Restores the parameters below `module` that are no longer views of their flat shards."""
    from fsdp_compile.parameters import integrity  # it lays units out anew, which needs this module

    for unit in _units_read_below(module):
        integrity.check(unit)


def _units_read_below(module: nn.Module) -> list[Unit]:
    """Units that modules in `module` read from; remembered until anything is sharded or laid out anew."""
    cached = module.__dict__.get(_UNITS_BELOW)
    if cached is None or cached[0] != _layouts[0]:
        reads = [read for m in module.modules() for read in m.__dict__.get(READS, {}).values()]
        cached = (_layouts[0], list(dict.fromkeys(flat.unit for _, _, flat in reads)))
        object.__setattr__(module, _UNITS_BELOW, cached)
    return cached[1]


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


def cast_inputs(
    policy: MixedPrecisionPolicy, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Floating-point inputs in the policy's `param_dtype`, if it asks for that."""
    if not policy.cast_forward_inputs or policy.param_dtype is None:
        return args, kwargs
    cast = functools.partial(_cast, policy.param_dtype)
    return tree_map(cast, args), tree_map(cast, kwargs)


def cast_output(policy: MixedPrecisionPolicy, output: Any) -> Any:
    """Floating-point outputs in the policy's `output_dtype`, if it has one."""
    return output if policy.output_dtype is None else tree_map(functools.partial(_cast, policy.output_dtype), output)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
