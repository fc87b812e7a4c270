"""What becomes of a plain parameter that was sharded while others still hold it.

Its memory is released and it turns into a `MovedParameter` that knows its successor. Optimizers that held it are given
the successor at once, with their state sharded; lists of parameters that users kept still find the gradients.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_compile import _torch
from fsdp_compile._torch import make_dtensor
from fsdp_compile.errors import ConfigError
from fsdp_compile.parameters.flat import ParameterSlot
from fsdp_compile.parameters.rows import local_part

_unannounced: list[nn.Parameter] = []
"""Parameters that were retired since optimizers were last told."""


class MovedParameter(nn.Parameter):
    """A plain parameter after it was sharded: `.grad` is its successor's, any computation with it is an error."""

    slot: ParameterSlot
    full_shape: torch.Size

    @property
    def grad(self) -> torch.Tensor | None:
        """The sharded gradient of the successor."""
        return self.slot.parameter.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.slot.parameter.grad = value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses to compute with memory that is gone; reading attributes is allowed."""
        if getattr(func, "__name__", "") in ("__get__", "__set__", "__hash__", "__repr__"):
            with _torch.plain_torch_functions():
                return func(*args, **(kwargs or {}))
        moved = next((a for a in args if isinstance(a, MovedParameter)), None)
        raise ConfigError(
            f"the parameter was sharded since you took it, and {getattr(func, '__name__', func)} needs its old memory",
            where=moved.slot.name if moved is not None else None,
            instead="take it from model.parameters() again after the first call of the compiled model",
        )


def retire(parameter: nn.Parameter, slot: ParameterSlot) -> None:
    """Releases the memory of a plain parameter and makes it point at its sharded successor."""
    shape = parameter.shape
    parameter.grad = None
    parameter.data = parameter.data.new_empty(0)
    parameter.__class__ = MovedParameter
    assert isinstance(parameter, MovedParameter)
    parameter.slot, parameter.full_shape = slot, shape
    _unannounced.append(parameter)


def successor(parameter: torch.Tensor) -> torch.Tensor:
    """The sharded parameter that took the place of `parameter`, or `parameter` itself."""
    return parameter.slot.parameter if isinstance(parameter, MovedParameter) else parameter


def update_optimizers() -> None:
    """Gives every optimizer of the process the successors of the parameters it holds, and shards its state.

    Does nothing if nothing was retired since the last call.
    """
    if not _unannounced:
        return
    _unannounced.clear()
    for optimizer in (o for o in gc.get_objects() if _is_optimizer(o)):
        for group in optimizer.param_groups:
            if any(isinstance(p, MovedParameter) for p in group["params"]):
                group["params"] = [successor(p) for p in group["params"]]
        for parameter in [p for p in optimizer.state if isinstance(p, MovedParameter)]:
            state = optimizer.state.pop(parameter)
            optimizer.state[successor(parameter)] = _shard_state(state, parameter)


def _is_optimizer(candidate: object) -> bool:
    # type(), not isinstance(): the latter asks proxies in the heap for their __class__ and may run their code.
    return issubclass(type(candidate), Optimizer)


def _shard_state(state: Any, parameter: MovedParameter) -> Any:
    if not isinstance(state, dict):
        raise ConfigError(
            f"an optimizer holds state of type {type(state).__name__}, which cannot be sharded",
            where=parameter.slot.name,
            instead="make the optimizer after the first call of the compiled model",
        )

    def convert(value: Any) -> Any:
        full = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.dim() > 0
        return shard_like(value, parameter.slot) if full and value.shape == parameter.full_shape else value

    return {key: convert(value) for key, value in state.items()}


def shard_like(value: torch.Tensor, slot: ParameterSlot) -> DTensor:
    """Keeps this rank's part of a full tensor that every rank holds, laid out as the parameter is; no communication."""
    like, dim, size = slot.dtensor, slot.spec.dim, slot.spec.size
    rank = like.device_mesh.get_local_rank(like.device_mesh.ndim - 1)
    return make_dtensor(local_part(value, dim, size, rank).clone(memory_format=torch.contiguous_format), like)
