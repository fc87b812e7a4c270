"""How a sharded module reads its parameters: the properties of its class, `named_parameters()` and `get_parameter()`.

In a forward a read gathers the parameter; anywhere else it gives what is registered.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.dynamo import skip_code
from fsdp_compile._torch.eval_frame import calls_are_compiled
from fsdp_compile.comm.spmd_params import SpmdParam
from fsdp_compile.comm.tensor_parallel import TensorParallel
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.modules.attributes import PARAM_ATTRIBUTES, with_attributes
from fsdp_compile.modules.eager_reads import as_parameter, gathered_from, read_eagerly, read_once, registered
from fsdp_compile.modules.forward import enter_running_forward, in_block_without_grad, in_forward
from fsdp_compile.runtime.extended_reads import key_with_state, read_extended
from fsdp_compile.runtime.module_state import reads_of
from fsdp_compile.runtime.unshard_args import UNSHARD_ARGS, UnshardArgs, swap_in

FLAT = "_fsdp_flat_"
"""Start of the attributes of a module that are the flat parameters it reads from, each once."""
READ_NAMES = "_fsdp_read_names"
TENSOR_PARALLEL = "_fsdp_tensor_parallel"
"""Attribute of a module: parameter name to its `TensorParallel`, for those that are DTensors when gathered."""
EXTENDED = "_fsdp_extended"
"""Attribute of a module: parameter name to its `FSDPParam`, for those whose class says how they are gathered."""


class GatheredBy(enum.Enum):
    """Who says how a parameter is gathered."""

    SPEC = "spec"
    CLASS = "class"
    """The parameter's class (`comm/gather_extension.py`)."""
    CLASS_OUTSIDE_GRAPHS = "class, outside of graphs"
    """Its class, which compilers cannot trace: a compiled forward leaves its graph for it."""


class ParamRead(NamedTuple):
    """How a class of modules reads one parameter: the same for all layers that are laid out alike.

    Attributes:
        name: Its attribute.
        flat: Number of the flat parameter among those of a module.
        text: Of its `UnshardSpec`.
        eval_text: The same for eval mode, where that differs.
        has_attributes: Whether users put attributes on the parameter.
        is_tensor_parallel: Whether the gathered parameter is a DTensor.
        gathered_by: Who says how it is gathered.
    """

    name: str
    flat: int
    text: str
    eval_text: str | None
    has_attributes: bool
    is_tensor_parallel: bool = False
    gathered_by: GatheredBy = GatheredBy.SPEC


def read_property(read_of: ParamRead) -> property:
    """The property by which a class of modules reads one parameter."""
    name, gather = read_of.name, _gather(read_of)

    def gather_parameter(module: nn.Module) -> torch.Tensor:
        return as_parameter(gather(module), module)

    read_compiled, read_parameter = _noted(read_of, gather), _noted(read_of, gather_parameter)

    def read(module: nn.Module) -> torch.Tensor | None:
        if torch.compiler.is_compiling():
            return read_compiled(module)
        if in_forward() or (not calls_are_compiled() and enter_running_forward()):
            return read_eagerly(module, name, read_parameter)
        if calls_are_compiled():
            return read_once(module, name, read_parameter)
        return registered(module, name)

    def assign(module: nn.Module, value: torch.Tensor) -> None:
        # Only if nothing is registered: `nn.Module.__setattr__` takes parameters, and refuses plain tensors otherwise.
        if isinstance(value, DTensor):
            raise UnsupportedModelError(
                "a sharded parameter is replaced by a tensor that was computed from sharded ones, and not gathered",
                where=f"{getattr(module, '_fsdp_original_class', type(module)).__name__}, {name}",
                instead="do it (torch.nn.utils.weight_norm(), say) before fully_shard() or the first compiled call",
            )
        swap_in(module, name, value)

    def remove(module: nn.Module) -> None:
        swap_in(module, name, None)

    # One code object for all parameters: as graphs of their own they would recompile for each.
    for function in (read, assign, remove):
        skip_code(function.__code__)
    return property(read, assign, remove)


def _noted(read_of: ParamRead, gather: Callable[[nn.Module], torch.Tensor]) -> Callable[[nn.Module], torch.Tensor]:
    """`gather`, with the parameter's own attributes on what it returns."""
    name = read_of.name
    if not read_of.has_attributes:
        return gather

    def noted(module: nn.Module) -> torch.Tensor:
        return with_attributes(gather(module), getattr(module, PARAM_ATTRIBUTES)[name])

    for function in (noted, with_attributes):
        skip_code(function.__code__)
    return noted


def _gather(read_of: ParamRead) -> Callable[[nn.Module], torch.Tensor]:
    gather = _gather_local(read_of)
    if not read_of.is_tensor_parallel:
        return gather
    name = read_of.name

    def gather_dtensor(module: nn.Module) -> torch.Tensor:
        args, local = getattr(module, UNSHARD_ARGS), gather(module)
        if args is not None and name in args and local is args[name]:  # put in the place of the parameter
            return local
        return getattr(module, TENSOR_PARALLEL)[name].gathered(local)

    for function in (gather_dtensor, TensorParallel.gathered, SpmdParam.gathered):
        skip_code(function.__code__)
    return gather_dtensor


def _gather_local(read_of: ParamRead) -> Callable[[nn.Module], torch.Tensor]:
    name, flat_param, text, eval_text = read_of.name, f"{FLAT}{read_of.flat}", read_of.text, read_of.eval_text
    unshard = _unshard if read_of.gathered_by is GatheredBy.SPEC else _unshard_extended(read_of)

    def gather(module: nn.Module) -> torch.Tensor:
        args = getattr(module, UNSHARD_ARGS)
        own = None if args is None or name not in args else args[name]
        if isinstance(own, torch.Tensor):  # put in the place of the parameter
            return own
        if eval_text is not None and not module.training:
            return unshard(module, flat_param, *((eval_text,) if own is None else _eval_arguments(own)))
        if own is None:
            return unshard(module, flat_param, text)
        return unshard(module, flat_param, *_arguments(text, own))

    skip_code(gather.__code__)
    return gather


def _unshard(module: nn.Module, flat_param: str, *arguments: str | torch.Tensor | None) -> torch.Tensor:
    unsharded: torch.Tensor = torch.ops.fsdp_compile.unshard(getattr(module, flat_param), *arguments)
    return unsharded


def _unshard_extended(read_of: ParamRead) -> Callable[..., torch.Tensor]:
    name = read_of.name

    def unshard(module: nn.Module, flat_param: str, *arguments: str | torch.Tensor | None) -> torch.Tensor:
        param = getattr(module, EXTENDED)[name]
        key = key_with_state(param.extension, "training" if module.training else "eval")
        return read_extended(getattr(module, flat_param), param.sharded_view, key, *arguments)

    @torch.compiler.disable
    def unshard_outside(module: nn.Module, flat_param: str, *arguments: str | torch.Tensor | None) -> torch.Tensor:
        gathered = unshard(module, flat_param, *arguments)
        read = reads_of(module)[name]
        gathered_from(gathered, read.group, read.param)  # the next graph has it as an input
        return gathered

    skip_code(unshard.__code__)
    return unshard if read_of.gathered_by is GatheredBy.CLASS else unshard_outside


skip_code(_unshard.__code__)


def _arguments(text: str, args: UnshardArgs) -> tuple[str | torch.Tensor | None, ...]:
    """The arguments of a read besides the flat parameter."""
    own, _, unsharded, *gradients = args
    if torch.is_grad_enabled():
        return (own, unsharded, *gradients)
    # Each tensor argument makes another graph, and without gradients nothing accumulates.
    return (text,) if unsharded is None else (text, unsharded)


def _eval_arguments(args: UnshardArgs) -> tuple[str | torch.Tensor | None, ...]:
    """The same of a read in eval mode, where that has a text of its own: what is unsharded has another dtype."""
    _, text, _, *gradients = args
    # The same text without gradients: all reads of a graph reduce in one dtype.
    return (text, None, *gradients) if torch.is_grad_enabled() else (text,)


def named_parameters(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN003, ANN201
    """`named_parameters()`, and with it `parameters()`: in a forward, the results of reads."""
    # Eager code that turns gradients off in a forward (to update a moving average, say) writes into what is stored. A
    # forward that was called without them is an evaluation, which reads. In compiled code writes are refused.
    if torch.compiler.is_compiling() and self._fsdp_original_class.named_parameters is nn.Module.named_parameters:
        return _read_in_graph(self, *args, **kwargs)
    stored = self._fsdp_original_class.named_parameters(self, *args, **kwargs)
    if torch.compiler.is_compiling() or (in_forward() and not in_block_without_grad()):
        read = _read_each(self, stored, args[0] if args else kwargs.get("prefix", ""))
        if torch.compiler.is_compiling() or kwargs.get("remove_duplicate", True):
            return read
        return _once_each(self._fsdp_original_class.named_parameters(self, *args, **kwargs), read)
    return stored


def _read_in_graph(module, prefix="", recurse=True, remove_duplicate=True):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, FBT002
    """What `named_parameters()` gives in compiled code, without a look at stored shards.

    Dynamo makes inputs of what it sees, and fails at some: at shards that were frozen since the last compile, for one.
    """
    seen: list[torch.Tensor] = []
    for path, part in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        for attribute in part._parameters:
            is_read = attribute in getattr(part, READ_NAMES, ())
            value = getattr(part, attribute) if is_read else part._parameters[attribute]
            if value is None or any(value is other for other in seen):
                continue
            if remove_duplicate:
                seen.append(value)
            yield f"{path}.{attribute}" if path else attribute, value


def _read_each(module, stored, prefix):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    for name, _ in stored:
        path, _, attribute = name.removeprefix(prefix).removeprefix(".").rpartition(".")
        yield name, getattr(module.get_submodule(path), attribute)


def _once_each(stored, read):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The same result of a read for all names of a tied parameter, by which code finds out that it is tied."""
    made: dict[int, torch.Tensor] = {}
    for (name, value), (_, parameter) in zip(read, stored, strict=True):
        yield name, made.setdefault(id(parameter), value)


def get_parameter(self, target):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """`get_parameter()`: in a forward, the result of a read."""
    # torch's own refuses everything but an `nn.Parameter`, and so unsharded parameters.
    path, _, attribute = target.rpartition(".")
    module = self.get_submodule(path)
    # Not `module._parameters`: Dynamo would trace what it holds, with the gradients that it has by then.
    if attribute in getattr(module, READ_NAMES, ()):
        return getattr(module, attribute)
    return self._fsdp_original_class.get_parameter(self, target)


# Dynamo only inlines them: where compiled code is left to Python, they give sharded parameters.
for _function in (named_parameters, _read_in_graph, _read_each, _once_each):
    skip_code(_function.__code__)
