"""Finds models that run in compiled code and never reach the backend, before a rank trains a copy of its own.

Dynamo leaves some forwards to Python whole: that of an `nn.LSTM`, one that breaks the graph inside of a loop, or all
that come after its recompile limit. The backend is not called with their parameters then, and they are not sharded. So
before Dynamo compiles a frame for this backend, the plain parameters of all modules that the frame can reach get a hook
that refuses their gradients. What the backend shards loses it again.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp_compile._torch.dynamo import FrameToCompile, before_each_compile
from fsdp_compile.capture.adopt import adopt_reached
from fsdp_compile.capture.beside import refuse_wrappers_around
from fsdp_compile.capture.first_call import compiled_modules, modules_on_the_stack
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.runtime.module_state import units_below
from fsdp_compile.runtime.units import FSDPParamGroup
from fsdp_compile.sharding.checks import refuse_meta
from fsdp_compile.sharding.wrappers import refuse_wrappers

_BEFORE_THE_COMPILE = "call fsdp_compile.fully_shard(model) before torch.compile(model, backend='fsdp')"


class PlainModels:
    """The modules whose plain parameters refuse gradients, since compiled code reaches them."""

    def __init__(self) -> None:
        # By module and `id`: a weak reference to a parameter would keep it from being swapped.
        self._hooks: weakref.WeakKeyDictionary[nn.Module, dict[int, RemovableHandle]] = weakref.WeakKeyDictionary()

    def add(self, root: nn.Module) -> None:
        """Adds a module, unless parts of it are sharded: its other parameters are ignored ones, or checked with it."""
        parameters = list(nn.Module.named_parameters(root))
        # Plain values may stand in the place of sharded parameters (`functional_call`).
        if root in self._hooks or units_below(root) or any(isinstance(p, DTensor) for _, p in parameters):
            return
        self._hooks[root] = {
            id(parameter): parameter.register_post_accumulate_grad_hook(_refusal(type(root).__name__, name))
            for name, parameter in parameters
            # A part of a sharded model may be compiled alone, and not know what a module above it ignores.
            if parameter.requires_grad and parameter.is_leaf and not _is_ignored(parameter)
        }

    def remove(self, root: nn.Module) -> None:
        """Removes the parameters of a module that is about to be sharded."""
        for hooks in self._hooks.values():
            for each in hooks.keys() & {id(parameter) for parameter in nn.Module.parameters(root)}:
                hooks.pop(each).remove()


def _is_ignored(parameter: torch.Tensor) -> bool:
    return any(id(parameter) in group.unit.model.ignored for group in FSDPParamGroup.alive())


def _refusal(model: str, name: str) -> Callable[[torch.Tensor], None]:
    def refuse(parameter: torch.Tensor) -> None:
        # The user has called `fully_shard` since; hooks move to the DTensor.
        if isinstance(parameter, DTensor) or _is_ignored(parameter):
            return
        raise UnsupportedModelError(
            "the compiled model was never handed to its backend, so it is not sharded and its gradients are not "
            "averaged: Dynamo left its forward to Python (TORCH_LOGS=graph_breaks,recompiles says why)",
            where=f"{model}, parameter {name}, in backward",
            instead=_BEFORE_THE_COMPILE,
        )

    return refuse


def watch_compiles(backend: object, plain: PlainModels) -> None:
    """Watches all compiles of the process for modules that compiled code reaches.

    The backend's module calls this when it is imported, which `torch.compile` does before it wraps the first model.

    Args:
        backend: The function that Dynamo calls.
        plain: Where modules are added that compiled code reaches.
    """

    def before_compile(frame: FrameToCompile) -> None:
        if frame.backend is backend:
            refuse_wrappers_around(modules_on_the_stack())
            reached = list(dict.fromkeys((*compiled_modules(), *_modules_in(frame))))
            adopt_reached(reached, frame.starts)
            for module in reached:
                refuse_wrappers(module)
                refuse_meta(module)
                plain.add(module)

    before_each_compile(before_compile)


def _modules_in(frame: FrameToCompile) -> Iterator[nn.Module]:
    """Modules among the values of a frame, their attributes that its code names, and what such containers hold."""
    held = [value.__self__ if isinstance(value, types.MethodType) else value for value in frame.held]
    owners = [value for value in held if not isinstance(value, nn.Module) and hasattr(value, "__dict__")]
    attributes = [vars(owner)[name] for owner in owners for name in frame.names & vars(owner).keys()]
    for value in (*held, *attributes):
        inside: Iterable[object] = value.values() if isinstance(value, dict) else value
        found = inside if isinstance(value, dict | list | tuple) else [value]
        yield from (each for each in found if isinstance(each, nn.Module))
