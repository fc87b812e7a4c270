"""Refuses models that a compiled function calls and that never reach the backend, before each rank trains its own copy.

Where Dynamo runs a function in Python, it compiles what user code that function calls, and `watch_compiles` finds the
models there. Modules of torch's own are not found so: an `nn.LSTM` in a closure, say. So before Dynamo compiles a frame
for this backend, the plain parameters of all modules that the frame can reach get a hook that refuses their gradients.
What is sharded loses it again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp_compile._torch.dynamo import FrameToCompile, graph_break_reasons
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.runtime.module_state import stored_parameters, units_below
from fsdp_compile.runtime.units import FSDPParamGroup

_INSTEAD = (
    "fsdp_compile.fully_shard(model) before the function's first call; or compile the model and not the function: "
    "model = torch.compile(model, backend='fsdp')"
)


class PlainModels:
    """The modules whose plain parameters refuse gradients, since compiled code reaches them."""

    def __init__(self) -> None:
        # By module and `id`: a weak reference to a parameter would keep it from being swapped.
        self._hooks: weakref.WeakKeyDictionary[nn.Module, dict[int, RemovableHandle]] = weakref.WeakKeyDictionary()

    def add(self, root: nn.Module) -> None:
        """Adds a module, unless parts of it are sharded: its other parameters are ignored ones, or checked with it."""
        if root in self._hooks or _is_sharded(root):
            return
        self._hooks[root] = {
            id(parameter): parameter.register_post_accumulate_grad_hook(_refusal(type(root).__name__, name))
            for name, parameter in _trained(root)
        }

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
        """Removes the parameters of a module that is about to be sharded."""
        for hooks in self._hooks.values():
            for each in hooks.keys() & {id(parameter) for parameter in stored_parameters(root)}:
                hooks.pop(each).remove()


def _is_sharded(root: nn.Module) -> bool:
    # Plain values may stand in the place of sharded parameters (`functional_call`).
    return bool(units_below(root)) or any(isinstance(p, DTensor) for p in stored_parameters(root))


def _trained(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The plain parameters of a module that get gradients."""
    for name, parameter in nn.Module.named_parameters(root):
        # A part of a sharded model may be compiled alone, and not know what a module above it ignores.
        if parameter.requires_grad and parameter.is_leaf and not _is_ignored(parameter):
            yield name, parameter


def _is_ignored(parameter: torch.Tensor) -> bool:
    return any(id(parameter) in group.unit.model.ignored for group in FSDPParamGroup.alive())


def _refusal(model: str, name: str) -> Callable[[torch.Tensor], None]:
    def refuse(parameter: torch.Tensor) -> None:
        # The user has called `fully_shard` since; hooks move to the DTensor.
        if isinstance(parameter, DTensor) or _is_ignored(parameter):
            return
        raise UnsupportedModelError(
            "a compiled function calls this model, which never reached the backend, so it is not sharded and its "
            f"gradients are averaged by no rank: Dynamo runs the call in Python{_because()}",
            where=f"{model}, parameter {name}, in backward",
            instead=_INSTEAD,
        )

    return refuse


def _because() -> str:
    reasons = graph_break_reasons()[-3:]
    if not reasons:
        return " (TORCH_LOGS=graph_breaks,recompiles shows why)"
    return f". What it could not trace: {'; '.join(reasons)} (TORCH_LOGS=graph_breaks shows where)"
