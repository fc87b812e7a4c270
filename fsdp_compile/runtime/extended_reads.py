"""Reads of parameters with all-gather extensions: gathered by their class, with gradients like those of any read.

Dynamo puts a call of `read_extended` into its graph as it is. AOTAutograd traces it: the methods of the class, the
all-gathers between them, and in backward `fsdp_compile.reduce_grad`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fsdp_compile.comm.gather_extension import GatherExtension
from fsdp_compile.errors import InvariantError, UnsupportedModelError
from fsdp_compile.layout.spec import parse
from fsdp_compile.runtime.kernels import gradient_of_read, save_read
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup

_numbers = itertools.count()
_by_key: weakref.WeakValueDictionary[str, FSDPParam] = weakref.WeakValueDictionary()
"""Graphs name parameters, since an argument of a call in a graph is a tensor or a constant."""


def new_key(name: str) -> str:
    """A name by which graphs may know a parameter with an extension, and no other one."""
    return f"{name}#{next(_numbers)}"


def register(param: FSDPParam) -> None:
    """Makes a parameter with an extension known to graphs."""
    assert param.extension is not None
    _by_key[param.extension.key] = param


def follow_state(group: FSDPParamGroup) -> bool:
    """Notes which plain attributes the shard, the class and the module of each parameter have.

    Methods are traced once for each state, and may read such attributes; Dynamo guards on none of them, and not on
    which tensors a shard has.

    Returns:
        Whether some have changed since the last call.
    """
    changed = False
    for param in group.params:
        extension = param.extension
        assert extension is not None
        state = _state_of(param.sharded_view, extension.module())
        if state != extension.state:
            runs = extension.can_be_traced(param.sharded_view, param.spec.text, param.spec.param_dtype)
            param.extension = dataclasses.replace(extension, state=state, runs_in_traces=runs)
            changed = True
    return changed


def has_other_state(group: FSDPParamGroup) -> bool:
    """Whether such an attribute has changed since `follow_state`."""
    for param in group.params:
        assert param.extension is not None
        state = param.extension.state
        if state and state != _state_of(param.sharded_view, param.extension.module()):
            return True
    return False


def key_with_state(extension: GatherExtension, mode: str) -> str:
    """What a read passes on for the parameter: its key, and all that is no tensor and that its methods may ask for."""
    return f"{extension.key}{_APART}{extension.state}{_APART}{mode}"


_APART = " | "


def _state_of(shard: torch.Tensor, module: nn.Module | None) -> str:
    classes = [kind for kind in type(shard).__mro__ if kind not in torch.Tensor.__mro__]
    found = [
        (name, _text_of(value))
        for owner in (shard, *classes, *(() if module is None else (module,)))
        for name, value in vars(owner).items()
        if isinstance(value, (*_PLAIN, torch.Tensor)) and not name.startswith("__") and name != "training"
    ]
    # Not `hash()`, which is the same for -1 and -2, and for texts another one in each process.
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _text_of(value: object) -> str:
    """A plain value, exactly, whatever a subclass shows; empty for a tensor."""
    return next((kind.__repr__(value) for kind in _PLAIN if isinstance(value, kind)), "")


_PLAIN = (bool, int, float, complex, str, torch.dtype)


class _ReadExtended(torch.autograd.Function):
    """A gathered parameter; its gradient goes where that of `fsdp_compile::unshard` goes, whose inputs it has."""

    @staticmethod
    def forward(
        flat: torch.Tensor,  # noqa: ARG004
        spec: str,  # noqa: ARG004
        unsharded_param: torch.Tensor,
        grad_accumulator: torch.Tensor | None,  # noqa: ARG004
        unsharded_accumulated_grad: torch.Tensor | None,  # noqa: ARG004
        partial_reduce_output: torch.Tensor | None,  # noqa: ARG004
    ) -> torch.Tensor:
        return unsharded_param.detach()  # of an input torch would make a view, which not all classes have

    setup_context = staticmethod(save_read)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient_of_read(ctx, grad)


@torch.compiler.allow_in_graph
def read_extended(
    flat: torch.Tensor,
    shard: torch.Tensor,
    key: str,
    spec: str,
    unsharded_param: torch.Tensor | None = None,
    grad_accumulator: torch.Tensor | None = None,
    unsharded_accumulated_grad: torch.Tensor | None = None,
    partial_reduce_output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gathers one parameter as its class says.

    Args:
        flat: The leaf that its gradient goes to.
        shard: This rank's part, or what stands for it in a trace.
        key: Of the parameter, and what else its methods may ask for: Dynamo guards on arguments.
        spec: As of `fsdp_compile::unshard`, like all that follow.
        unsharded_param: The unsharded parameter, if it is gathered already.
        grad_accumulator: The leaf for gradients that are not fully reduced.
        unsharded_accumulated_grad: Pending unsharded gradients.
        partial_reduce_output: Pending gradients that lack their sum over replicas.

    Returns:
        The unsharded parameter, of whatever class `fsdp_post_all_gather` returns.
    """
    param = _by_key.get(key.partition(_APART)[0])
    if param is None or param.extension is None:
        raise InvariantError(f"a graph reads the parameter {key}, which is gone")
    if unsharded_param is None:
        started = param.extension.start(param.sharded_view, shard, spec)
        dtype = parse(spec).param_dtype
        unsharded_param = param.extension.finish(param.sharded_view, shard, started, dtype)
    read: torch.Tensor = _ReadExtended.apply(
        flat, spec, unsharded_param, grad_accumulator, unsharded_accumulated_grad, partial_reduce_output
    )
    read._is_param = True  # for code that asks what it is
    return read


def refuse_extended(params: Iterable[FSDPParam], where: str, *, instead: str) -> None:
    """Raises `UnsupportedModelError` if a parameter has an all-gather extension: its class knows no full value.

    Args:
        params: Those whose full values are needed.
        where: The call that needs them.
        instead: What to write.
    """
    found = next((param for param in params if param.extension is not None), None)
    if found is not None:
        raise UnsupportedModelError(
            f"a parameter of class {type(found.sharded_view).__qualname__} says by itself how it is gathered for a "
            "forward (an all-gather extension), and nothing says what its full value is",
            where=f"{where}, {found.name}",
            instead=instead,
        )
