"""Shards plain modules that are compiled before their first forward, whatever Dynamo makes of that.

Dynamo need not call the backend for a model: it leaves some forwards to Python whole (that of an `nn.LSTM`, one that
breaks the graph inside of a loop, all that come after its recompile limit), and compiles nothing of torch's own classes
in place. So a module that is compiled itself is sharded when it is called first, and one that compiled code calls in
Python before Dynamo compiles a frame inside of that call. What a compiled function traces whole reaches the backend.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from fsdp_compile._torch.compiled_modules import after_each_compile_of_a_module
from fsdp_compile._torch.dynamo import (
    FrameToCompile,
    OptimizedModule,
    before_each_compile,
    call_of,
    graph_breaks,
    options_of,
)
from fsdp_compile.capture.adopt import adopt_reached
from fsdp_compile.capture.before_first_call import BeforeFirstCall, Found, remove_hook
from fsdp_compile.capture.beside import refuse_wrappers_around
from fsdp_compile.capture.first_call import check_compiled_calls, compiled_modules, modules_on_the_stack
from fsdp_compile.capture.plain_model import shard_before_forward
from fsdp_compile.capture.unreached import PlainModels, Why
from fsdp_compile.modules.classes import original_class
from fsdp_compile.modules.forward import in_first_call, in_forward, in_forward_during
from fsdp_compile.options import FSDPOptions
from fsdp_compile.runtime.module_state import is_sharded
from fsdp_compile.sharding.checks import refuse_meta
from fsdp_compile.sharding.views import refuse_removed
from fsdp_compile.sharding.wrappers import refuse_wrappers


def watch_compiles(backend: object, plain: PlainModels) -> None:
    """Watches all compiles of the process for plain modules.

    The backend's module calls this when it is imported, which `torch.compile` does before it wraps the first model.

    Args:
        backend: The function that Dynamo calls.
        plain: Where modules are added that are compiled, or that compiled code reaches, and that are not sharded yet.
    """
    watch = _Watch(backend, plain)
    after_each_compile_of_a_module(backend, watch.wrapped, watch.compiled_in_place)
    before_each_compile(backend, watch.before_compile)


@dataclasses.dataclass(frozen=True)
class _Watch:
    backend: object
    plain: PlainModels
    breaks_before: Counter[str] = dataclasses.field(default_factory=graph_breaks)
    """Dynamo's graph breaks until the last frame."""

    def wrapped(self, compiled: OptimizedModule, module: nn.Module) -> None:
        if original_class(module) is not type(module):  # of a sharded model: its forward checks what it reads
            return
        self.plain.add(module, Why.COMPILED)
        BeforeFirstCall(compiled, self._shard_wrapped)

    def _shard_wrapped(self, compiled: OptimizedModule) -> Found:
        module = compiled._orig_mod
        adopt_reached([module])
        found = shard_before_forward(module, FSDPOptions.from_dict(options_of(compiled)), self.plain)
        if is_sharded(module):  # maybe by the call of another wrapper
            check_compiled_calls(compiled, module)
        return found

    def compiled_in_place(self, module: nn.Module, arguments: Mapping[str, Any]) -> None:
        remove_hook(module)
        if arguments.get("backend") not in ("fsdp", self.backend) or arguments.get("disable"):
            self.plain.discard(module)
            return
        self.plain.add(module, Why.COMPILED)
        BeforeFirstCall(module, functools.partial(self._shard_in_place, options=arguments.get("options")))

    def _shard_in_place(self, module: nn.Module, options: Mapping[str, Any] | None) -> Found:
        found = shard_before_forward(module, FSDPOptions.from_dict(options), self.plain)
        if found is Found.SHARDED:
            # Its forward was chosen before: it is not the one that makes reads gather.
            in_forward_during(module, call_of(module))
        return found

    def before_compile(self, frame: FrameToCompile) -> None:
        now = graph_breaks()
        breaks = now - self.breaks_before
        self.breaks_before.clear()
        self.breaks_before.update(now)
        refuse_wrappers_around(modules_on_the_stack())
        called = list(dict.fromkeys(compiled_modules()))
        held = list(dict.fromkeys(_modules_in(frame)))
        adopt_reached(dict.fromkeys((*called, *held)), frame.starts)
        for module in called:
            refuse_wrappers(module)
            if shard_before_forward(module, FSDPOptions.from_dict(frame.options), self.plain) is Found.SHARDED:
                in_first_call(module, call_of(module))
                _warn_of_python(module, frame, breaks)
        for module in held:
            refuse_wrappers(module)
            refuse_meta(module)
            if not in_forward():  # which may put values in the place of parameters for a while
                refuse_removed(module)
            self.plain.add(module, Why.REACHED)
            if frame.limit:
                self.plain.refuse_past_limit(module, frame)


def _warn_of_python(module: nn.Module, frame: FrameToCompile, breaks: Counter[str]) -> None:
    reasons = "; ".join(breaks) or "TORCH_LOGS=graph_breaks shows why"
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
