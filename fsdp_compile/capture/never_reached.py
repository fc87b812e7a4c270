"""Models that were compiled with this backend and never reached it: noticed at their optimizer's first step.

Dynamo leaves some forwards to Python whole: one that starts with an `nn.LSTM`, or one that breaks the graph inside of a
loop. Nothing calls the backend then, so nothing shards the model, and every rank would train a copy of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_compile import _torch
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.heap import instances_of

_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def watch_optimizers(backend: object) -> None:
    """Looks at every optimizer of the process once, at its first step with gradients of plain parameters.

    Args:
        backend: The function that `torch.compile` calls for this backend.
    """

    def before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer in _seen:
            return
        trained = {id(p) for group in optimizer.param_groups for p in group["params"] if _is_trained_plainly(p)}
        if trained:
            _refuse_unsharded(backend, trained)
        _seen.add(optimizer)

    register_optimizer_step_pre_hook(before_step)


def _is_trained_plainly(parameter: object) -> bool:
    return isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor) and parameter.grad is not None


def _refuse_unsharded(backend: object, trained: set[int]) -> None:
    for model in _compiled_models(backend):
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
    """Whether the model has run compiled: before that, its optimizer may well step, and state is sharded later."""
    codes = (getattr(type(module).forward, "__code__", None) for module in model.modules())
    return any(code is not None and _torch.was_looked_at(code) for code in codes)


def _compiled_models(backend: object) -> Iterator[nn.Module]:
    """Models that were given to `torch.compile` with this backend."""
    for candidate in instances_of(_torch.OptimizedModule):
        if _torch.backend_of(candidate) is backend:
            yield candidate._orig_mod
