"""Shards plain modules that are compiled before their first forward, whatever Dynamo makes of that.

Dynamo need not call the backend for a model: it leaves some forwards to Python whole (that of an `nn.LSTM`, one that
breaks the graph inside of a loop, all that come after its recompile limit), and compiles nothing of torch's own classes
in place. So a module that is compiled itself is sharded when it is called first, and one that compiled code calls in
Python before Dynamo compiles a frame inside of that call. What a compiled function traces whole reaches the backend.
"""

from __future__ import annotations

import dataclasses
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_compile._torch.compiled_modules import after_each_compile_of_a_module
from fsdp_compile._torch.dynamo import (
    FrameToCompile,
    OptimizedModule,
    backend_of,
    before_each_compile,
    call_of,
    graph_break_reasons,
    options_of,
    skip_code,
)
from fsdp_compile.capture.adopt import adopt_reached
from fsdp_compile.capture.beside import refuse_wrappers_around
from fsdp_compile.capture.first_call import check_compiled_calls, compiled_modules, modules_on_the_stack
from fsdp_compile.capture.plain_model import shard_before_forward
from fsdp_compile.capture.unreached import PlainModels
from fsdp_compile.modules.classes import original_class
from fsdp_compile.modules.forward import in_forward, in_forward_until_return
from fsdp_compile.options import FSDPOptions
from fsdp_compile.sharding.checks import refuse_meta
from fsdp_compile.sharding.views import refuse_removed
from fsdp_compile.sharding.wrappers import refuse_wrappers

_first_calls: weakref.WeakKeyDictionary[nn.Module, Callable[[nn.Module], object]] = weakref.WeakKeyDictionary()
"""What is to be done when a compiled module is called first. Its copies are not compiled, and not in here."""


def watch_compiles(backend: object, plain: PlainModels) -> None:
    """Watches all compiles of the process for plain modules.

    The backend's module calls this when it is imported, which `torch.compile` does before it wraps the first model.

    Args:
        backend: The function that Dynamo calls.
        plain: Where modules are added that compiled code reaches and that are not sharded yet.
    """
    watch = _Watch(backend, plain)
    after_each_compile_of_a_module(watch.wrapped, watch.compiled_in_place)
    before_each_compile(watch.before_compile)


@dataclasses.dataclass(frozen=True)
class _Watch:
    backend: object
    plain: PlainModels

    def wrapped(self, compiled: OptimizedModule) -> None:
        _before_first_call(compiled, self._shard_wrapped)

    def _shard_wrapped(self, compiled: nn.Module) -> None:
        assert isinstance(compiled, OptimizedModule)
        if backend_of(compiled) is not self.backend:
            return
        if shard_before_forward(compiled._orig_mod, FSDPOptions.from_dict(options_of(compiled)), self.plain):
            check_compiled_calls(compiled, compiled._orig_mod)

    def compiled_in_place(self, module: nn.Module, arguments: Mapping[str, Any]) -> None:
        if arguments.get("backend") not in ("fsdp", self.backend) or arguments.get("disable"):
            return
        options = arguments.get("options")
        _before_first_call(module, lambda called: self._shard_during_call(called, options))

    def before_compile(self, frame: FrameToCompile) -> None:
        if frame.backend is not self.backend:
            return
        refuse_wrappers_around(modules_on_the_stack())
        called = list(dict.fromkeys(compiled_modules()))
        adopt_reached(dict.fromkeys((*called, *_modules_in(frame))), frame.starts)
        for module in called:
            refuse_wrappers(module)
            if self._shard_during_call(module, frame.options):
                _warn_of_python(module, frame)
        for module in dict.fromkeys(_modules_in(frame)):
            refuse_wrappers(module)
            refuse_meta(module)
            if not in_forward():  # which may put values in the place of parameters for a while
                refuse_removed(module)
            self.plain.add(module)
            if frame.limit:
                self.plain.refuse_past_limit(module, frame)

    def _shard_during_call(self, module: nn.Module, options: Mapping[str, Any] | None) -> bool:
        """Shards a plain module whose call has begun; returns whether there was anything to shard."""
        if not shard_before_forward(module, FSDPOptions.from_dict(options), self.plain):
            return False
        # Its forward was chosen before: it is not the one that makes reads gather.
        in_forward_until_return(call_of(module))
        return True


def _before_first_call(caller: nn.Module, shard: Callable[[nn.Module], object]) -> None:
    if caller not in _first_calls:
        caller.register_forward_pre_hook(first_call, prepend=True)
    _first_calls[caller] = shard


def first_call(caller: nn.Module, _args: Any) -> None:
    """A forward pre-hook of compiled modules: shards at the first call, and removes itself."""
    # Inside of other compiled code nothing is called by itself: the backend gets what that code reads.
    if not torch.compiler.is_compiling():
        _first_call(caller)


@torch.compiler.disable
def _first_call(caller: nn.Module) -> None:
    for key in [key for key, hook in caller._forward_pre_hooks.items() if hook is first_call]:
        del caller._forward_pre_hooks[key]
    shard = _first_calls.pop(caller, None)
    if shard is not None:
        shard(caller)


skip_code(first_call.__code__)


def _warn_of_python(module: nn.Module, frame: FrameToCompile) -> None:
    reasons = "; ".join(graph_break_reasons()[-3:]) or "TORCH_LOGS=graph_breaks shows why"
    warnings.warn_explicit(
        f"Dynamo runs the call of {original_class(module).__name__} by a compiled function in Python ({reasons}): the "
        "model is sharded as a whole, and at most parts of it are compiled. Compile the model and not the function, "
        "torch.compile(model, backend='fsdp'), if the same function is compiled for several models: it is not said "
        "again for the others, which train unsharded unless fully_shard(model) was called",
        UserWarning,
        frame.code.co_filename,
        frame.code.co_firstlineno,
    )


def _modules_in(frame: FrameToCompile) -> Iterator[nn.Module]:
    """Modules among the values of a frame, their attributes that its code names, and what such containers hold."""
    held = [value.__self__ if isinstance(value, types.MethodType) else value for value in frame.held]
    owners = [value for value in held if not isinstance(value, nn.Module) and hasattr(value, "__dict__")]
    attributes = [vars(owner)[name] for owner in owners for name in frame.names & vars(owner).keys()]
    for value in (*held, *attributes):
        inside: Iterable[object] = value.values() if isinstance(value, dict) else value
        found = inside if isinstance(value, dict | list | tuple) else [value]
        yield from (each for each in found if isinstance(each, nn.Module))
