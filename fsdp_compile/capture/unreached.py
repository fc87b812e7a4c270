"""Refuses compiled models that never reach the backend, before each rank trains its own copy.

Where Dynamo runs a function in Python, it compiles what user code that function calls, and `watch_compiles` finds the
models there. Modules of torch's own are not found so: an `nn.LSTM` in a closure, say. Nor is a model that is compiled
itself, if a script calls the plain one, or another method of what `torch.compile` has returned. So the plain parameters
of all modules that are compiled, or that a frame can reach which Dynamo is about to compile for this backend, get a
hook that refuses their gradients. The sharded ones in their place have none.
"""

from __future__ import annotations

import enum
import weakref
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from fsdp_compile._torch.autograd import HookOfPlain
from fsdp_compile._torch.dynamo import FrameToCompile, graph_breaks
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.runtime.module_state import (
    ignored_parameters,
    named_stored_parameters,
    stored_parameters,
    units_below,
)
from fsdp_compile.runtime.replaced_params import ReplacedParameter

_INSTEAD = (
    "fsdp_compile.fully_shard(model) before the function's first call; or compile the model and not the function: "
    "model = torch.compile(model, backend='fsdp')"
)


class Why(enum.Enum):
    """Why the plain parameters of a module refuse gradients."""

    COMPILED = "compiled"
    """It is compiled itself, and waits for its first call."""
    REACHED = "reached"
    """A compiled function can reach it."""


class PlainModels:
    """The modules whose plain parameters refuse gradients, since compiled code reaches them, or should."""

    def __init__(self) -> None:
        # By module and `id`: a weak reference to a parameter would keep it from being swapped.
        self._hooks: weakref.WeakKeyDictionary[nn.Module, dict[int, RemovableHandle]] = weakref.WeakKeyDictionary()
        self._compiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def add(self, root: nn.Module, why: Why) -> None:
        """Adds a module, unless parts of it are sharded: its other parameters are ignored ones, or checked with it."""
        if why is Why.COMPILED:
            self._compiled.add(root)
        if root in self._hooks or _is_sharded(root):
            return
        self._hooks[root] = {
            id(parameter): parameter.register_post_accumulate_grad_hook(_Refusal(type(root).__name__, name, why))
            for name, parameter in _trained(root)
        }

    def is_compiled(self, module: nn.Module) -> bool:
        """Whether a module was compiled itself, for this backend."""
        return module in self._compiled

    def roots(self) -> list[nn.Module]:
        """The modules that were added and that have, or had, plain parameters."""
        return list(self._hooks)

    def discard(self, root: nn.Module) -> None:
        """Removes a module, which is compiled for another backend now."""
        self._compiled.discard(root)
        for handle in self._hooks.pop(root, {}).values():
            handle.remove()

    def refuse_past_limit(self, root: nn.Module, frame: FrameToCompile) -> None:
        """Refuses a plain model in a frame that Dynamo leaves to Python from now on, without telling of later calls.

        Raises:
            UnsupportedModelError: If a parameter of it needs gradients.
        """
        name = next((name for name, _ in _trained(root)), None)
        if _is_sharded(root) or name is None:
            return
        setting, code = frame.limit.split()[0], frame.code
        place = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        raise UnsupportedModelError(
            f"a compiled function has met Dynamo's {frame.limit} and runs in Python from now on: a model that it calls "
            "for the first time would never reach the backend, and each rank would train a copy of its own",
            where=f"{type(root).__name__}, parameter {name}, in {place}",
            instead=f"{_INSTEAD}; or a larger torch._dynamo.config.{setting}, which counts each model that the same "
            "code is compiled for",
        )

    def remove(self, root: nn.Module) -> None:
        """Removes the parameters of a module, which another data parallelism averages."""
        inside = {id(parameter) for parameter in stored_parameters(root)}
        for hooks in self._hooks.values():
            for each in hooks.keys() & inside:
                hooks.pop(each).remove()


def _is_sharded(root: nn.Module) -> bool:
    # Plain values may stand in the place of sharded parameters (`functional_call`).
    return bool(units_below(root)) or any(isinstance(p, DTensor) for p in stored_parameters(root))


def _trained(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The plain parameters of a module that get gradients."""
    # A part of a sharded model may be compiled alone, and not know what a module above it ignores.
    ignored = ignored_parameters()
    for name, parameter in named_stored_parameters(root):
        if isinstance(parameter, UninitializedParameter) or id(parameter) in ignored:
            continue
        if parameter.requires_grad and parameter.is_leaf:
            yield name, parameter


class _Refusal(HookOfPlain):
    """Refuses the gradient of a plain parameter."""

    def __init__(self, model: str, name: str, why: Why) -> None:
        self._where = f"{model}, parameter {name}, in backward"
        self._why = why
        self._breaks_before = graph_breaks()

    def __call__(self, parameter: torch.Tensor) -> None:
        """Raises `UnsupportedModelError`, unless the parameter was sharded since, or ignored by a `fully_shard`."""
        # A graph from before that sends its gradient here: it is passed on to the sharded one.
        if isinstance(parameter, ReplacedParameter) or id(parameter) in ignored_parameters():
            return
        if self._why is Why.COMPILED:
            raise UnsupportedModelError(
                "this model is compiled, and gets gradients before the first call of its compiled form, which would "
                "shard it: they are averaged by no rank",
                where=self._where,
                instead=_CALL_IT,
            )
        since = graph_breaks() - self._breaks_before
        raise UnsupportedModelError(
            "a compiled function calls this model, which never reached the backend, so it is not sharded and its "
            f"gradients are averaged by no rank: Dynamo runs the call in Python{_because(since)}",
            where=self._where,
            instead=_INSTEAD,
        )


_CALL_IT = (
    "loss = compiled(...), a call of what torch.compile() returned, whose other methods (compiled.training_step(...)) "
    "are those of the plain model; compiled in place, model(...) or self(...), and not a part of it; or "
    "fsdp_compile.fully_shard(model), with which every call trains it sharded"
)


def _because(breaks: Counter[str]) -> str:
    if not breaks:
        return " (TORCH_LOGS=graph_breaks,recompiles shows why)"
    return f". What it could not trace: {'; '.join(breaks)} (TORCH_LOGS=graph_breaks shows where)"
