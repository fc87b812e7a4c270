"""Finds models that were compiled with this backend and never reached it, at their optimizer's first step.

Dynamo leaves some forwards to Python whole: one that starts with an `nn.LSTM`, or one that breaks the graph inside of a
loop. The backend is never called then, the model is not sharded, and every rank would train a copy of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_compile._torch.dynamo import OptimizedModule, backend_of, was_compiled
from fsdp_compile.errors import UnsupportedModelError


def watch_optimizers(backend: object) -> None:
    """Checks every optimizer of the process once, at its first step with gradients of plain parameters.

    The backend's module calls this when it is imported, which `torch.compile` does before it wraps the first model.
    """
    compiled: weakref.WeakSet[OptimizedModule] = weakref.WeakSet()
    checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def note_compiled(module: nn.Module, _name: str, _submodule: nn.Module | None) -> None:
        if isinstance(module, OptimizedModule):
            compiled.add(module)

    def before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer in checked:
            return
        trained = {id(p) for group in optimizer.param_groups for p in group["params"] if _is_trained_plainly(p)}
        if trained:
            _refuse_unsharded([m._orig_mod for m in compiled if backend_of(m) is backend], trained)
        checked.add(optimizer)

    # `torch.compile(model)` makes a module with the model as a submodule, which this hook sees.
    register_module_module_registration_hook(note_compiled)
    register_optimizer_step_pre_hook(before_step)


def _is_trained_plainly(parameter: object) -> bool:
    return isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor) and parameter.grad is not None


def _refuse_unsharded(models: Iterable[nn.Module], trained: set[int]) -> None:
    for model in models:
        parameters = dict(model.named_parameters())
        name = next((n for n, p in parameters.items() if id(p) in trained), None)
        is_plain = not any(isinstance(p, DTensor) for p in parameters.values())
        if name is not None and is_plain and _was_called(model):
            raise UnsupportedModelError(
                "the compiled model was never handed to its backend, so it is not sharded: Dynamo left its forward to "
                "Python (TORCH_LOGS=graph_breaks says why)",
                where=f"{type(model).__name__}, parameter {name}, at the optimizer's step",
                instead="call fsdp_compile.fully_shard(model) before torch.compile(model, backend='fsdp')",
            )


def _was_called(model: nn.Module) -> bool:
    """Whether the model has run compiled."""
    # Before its first compiled call a model may be trained plainly; optimizer state is sharded later.
    codes = (getattr(type(module).forward, "__code__", None) for module in model.modules())
    return any(code is not None and was_compiled(code) for code in codes)
