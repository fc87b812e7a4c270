"""Plain parameters after they were sharded, for code that still refers to them.

Optimizers get the sharded parameters, and sharded state, when the model is sharded, or at the start of their next step.
What else refers to an old parameter (lists that users made) finds the attributes of its successor.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_compile._torch.autograd import is_saved_by_autograd
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.shards import shard_like

SEES_WHOLE = "_fsdp_whole"
"""Attribute of optimizers that see full parameters (`whole_step`): state that is not of their shapes stays whole."""
_METADATA = frozenset(
    {"__get__", "__set__", "__delete__", "__len__", "dim", "size", "numel", "stride", "is_floating_point", "is_complex"}
    | {"element_size", "nelement", "ndimension", "get_device", "has_names", "is_contiguous"}
)
"""Names of torch functions that read no values; the first three are attributes."""


class StaleParameter(nn.Parameter):
    """A plain parameter after it was sharded: its attributes are its successor's, computing with it is an error."""

    successor: nn.Parameter

    def __getattr__(self, name: str) -> Any:
        """What users have put on the successor; not what says that it is a tensor of another kind."""
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__["successor"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the successor."""
        if name == "data":
            raise refusal(self, "`.data = ...`")
        setattr(self.__dict__["successor"], name, value)

    def __hash__(self) -> int:
        """That of the plain parameter, under which optimizers have their state."""
        return id(self)

    def __repr__(self) -> str:  # type: ignore[override]
        """The successor's."""
        return f"StaleParameter of {self.__dict__['successor']!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy of the successor."""
        return copy.deepcopy(self.successor, memo)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses to compute with memory that is freed."""
        name = getattr(func, "__name__", str(func))
        if name in _METADATA and type(args[0]) is StaleParameter:
            return func(args[0].__dict__["successor"], *args[1:], **(kwargs or {}))
        raise refusal(next((a for a in args if isinstance(a, StaleParameter)), None), f"{name}()")


def refusal(parameter: StaleParameter | None, what: str) -> ConfigError:
    """The error for code that computes with a parameter it took before the model was sharded."""
    shape = None if parameter is None else f"a parameter of shape {tuple(parameter.__dict__['successor'].shape)}"
    return ConfigError(
        f"the parameter was sharded since you took it, and {what} needs its old memory",
        where=shape,
        instead="take it from model.parameters() again after the first call of the compiled model",
    )


def replace(successors: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Makes plain parameters stand for their sharded successors, and gives optimizers these.

    Raises:
        ConfigError: If an optimizer has state that cannot be sharded.
    """
    for optimizer in [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]:
        _follow(optimizer, successors)
    for old, new in successors.items():
        if isinstance(old, DTensor):  # split by tensor parallelism; it can get no other class
            continue
        # A graph that has read it needs the values in its backward.
        if not is_saved_by_autograd(old):
            old.data = old.data.new_empty(0)
        if old.requires_grad:
            old.register_hook(_refuse_gradient)
        vars(new).update(vars(old))
        vars(old).clear()
        old.__class__ = StaleParameter
        old.__dict__["successor"] = new


def _refuse_gradient(gradient: torch.Tensor) -> NoReturn:
    """Refuses the gradient of a loss that was made of plain parameters: it would not reach the sharded ones."""
    raise ConfigError(
        "a gradient goes to a plain parameter, by a computation from before the model was sharded, and would be lost",
        where=f"a parameter of shape {tuple(gradient.shape)}",
        instead="fully_shard(model) before anything is computed of its parameters",
    )


def follow_before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Gives sharded parameters to an optimizer that was made of a list from before, or that `gc` does not know."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if any(type(p) is StaleParameter for p in held):
        _follow(optimizer, {p: p.__dict__["successor"] for p in held if type(p) is StaleParameter})


def _follow(optimizer: Optimizer, successors: Mapping[nn.Parameter, nn.Parameter]) -> None:
    held = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"] if p in successors]
    if not held:
        return
    # All of it before anything is changed: an error leaves the optimizer as it was.
    state = {}
    for p in held:
        if p in optimizer.state:
            own = optimizer.state[p]
            if not isinstance(own, dict):
                raise _refuse_state(f"of type {type(own).__name__}", successors[p])
            state[p] = {key: _shard_value(key, value, successors[p], optimizer) for key, value in own.items()}
    for group in optimizer.param_groups:
        group["params"][:] = [successors.get(p, p) for p in group["params"]]  # in place: attributes may be the list
    for old, value in state.items():
        del optimizer.state[old]
        optimizer.state[successors[old]] = value


def _shard_value(key: str, value: Any, parameter: Any, optimizer: Optimizer) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or key == "step":
        return value
    if isinstance(value, DTensor):
        if (value.device_mesh, value.placements) == (parameter.device_mesh, parameter.placements):
            return value
        raise _refuse_state(f"{key!r}, which is split differently from its parameter", parameter)
    if value.shape == parameter.shape:
        return shard_like(value.to(parameter.device), parameter)
    if value.numel() == 1 or hasattr(optimizer, SEES_WHOLE):
        return value
    raise _refuse_state(
        f"{key!r}, which is not of its parameter's shape", parameter, "whole_step(optimizer) before that; else "
    )


def _refuse_state(what: str, parameter: Any, first: str = "") -> ConfigError:
    return ConfigError(
        f"an optimizer from before the model was sharded holds state {what}, and cannot follow",
        where=f"a parameter of shape {tuple(parameter.shape)}",
        instead=f"{first}make the optimizer after fully_shard(model), or after the first call of the compiled model",
    )
