"""Plain parameters after they were sharded, for code that still refers to them.

Their memory is released, and each becomes a `ReplacedParameter` that knows its successor. Optimizers get the successor,
and sharded state, at the start of their next step; lists of parameters that users made still find the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fsdp_compile._torch.autograd import is_saved_by_autograd
from fsdp_compile._torch.tensors import is_wrapper, local_tensor, make_dtensor, plain_torch_functions, set_local_tensor
from fsdp_compile.errors import ConfigError
from fsdp_compile.runtime.units import FSDPParam

_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""State of torch's optimizers that is one number."""


def is_number(key: object, shape: Sequence[int]) -> bool:
    """Whether state of this name and shape is one number, and not a value for each element of a parameter."""
    # By name, too: all state of a 0-d parameter is 0-d. By shape: other optimizers call what they like "mu". Counts of
    # steps may have one element (torch's had); a rank's part of a parameter's state may have one as well.
    return key in _NUMBERS and (len(shape) == 0 or (key == "step" and math.prod(shape) == 1))


class ReplacedParameter(nn.Parameter):
    """A plain parameter after it was sharded: its attributes are its successor's, any computation with it is an error.

    `.grad`, `.requires_grad` and what users put on it can be set, which sets them for the successor.
    """

    param: FSDPParam
    full_shape: torch.Size

    def __getattr__(self, name: str) -> Any:
        """What users and libraries have put on the successor; not what says that it wraps another tensor."""
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        param: FSDPParam = object.__getattribute__(self, "param")
        return getattr(param.parameter, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the successor."""
        if name == "data":
            raise _refusal(self, f"`.{name} = ...`")
        setattr(self.param.parameter, name, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses to compute with memory that is freed; torch's attributes are the successor's."""
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            return func(current(args[0]), *args[1:])
        if name in ("__hash__", "__repr__"):
            with plain_torch_functions():
                return func(*args, **(kwargs or {}))
        raise _refusal(next((a for a in args if isinstance(a, ReplacedParameter)), None), name)


def _refusal(moved: ReplacedParameter | None, what: str) -> ConfigError:
    return ConfigError(
        f"the parameter was sharded since you took it, and {what} needs its old memory",
        where=moved.param.name if moved is not None else None,
        instead="take it from model.parameters() again after the first call of the compiled model. An optimizer "
        "made before takes the sharded parameters in its first step: make it after fully_shard(model) where "
        "that is in compiled code, or where torch's functions get or set its state before",
    )


def mark_replaced(parameter: nn.Parameter, param: FSDPParam) -> None:
    """Makes a plain parameter point at its sharded successor, and releases its memory."""
    shape = parameter.shape
    parameter.grad = None
    # A graph that has read it needs the values in its backward.
    wraps, is_read = is_wrapper(parameter), is_saved_by_autograd(parameter)
    if not (wraps or is_read):
        parameter.data = parameter.data.new_empty(0)
    if not (wraps and is_read):  # a wrapper has its memory there
        vars(parameter).clear()
    parameter.__class__ = ReplacedParameter
    vars(parameter).update(param=param, full_shape=shape)


_SUCCESSOR = "_fsdp_successor"
"""Attribute of a DTensor, which can get no other class, that a sharded parameter has replaced."""


def mark_split_replaced(parameter: DTensor, param: FSDPParam) -> None:
    """As `mark_replaced`, for a split parameter: a DTensor without memory, with which nothing can be computed."""
    parameter.grad = None
    set_local_tensor(parameter, local_tensor(parameter).new_empty(0))
    setattr(parameter, _SUCCESSOR, param)


def _is_replaced(parameter: torch.Tensor) -> bool:
    # Not by `vars`, in which Dynamo fails: it traces optimizers that step inside of a compiled function.
    return type(parameter) is ReplacedParameter or hasattr(parameter, _SUCCESSOR)


def current(parameter: torch.Tensor) -> torch.Tensor:
    """The sharded parameter that replaced `parameter`, or `parameter` itself."""
    if isinstance(parameter, ReplacedParameter):
        return parameter.param.parameter
    successor: FSDPParam | None = getattr(parameter, _SUCCESSOR, None)
    return parameter if successor is None else successor.parameter


def update_optimizer(optimizer: Optimizer) -> None:
    """Replaces the replaced parameters of an optimizer by their successors, and shards its state.

    Raises:
        ConfigError: If it has state that cannot be sharded; the optimizer is not changed then.
    """
    replaced = [p for group in optimizer.param_groups for p in group["params"] if _is_replaced(p)]
    if not replaced:
        return
    # All of it before anything is changed: an error leaves the optimizer as it was.
    state = {p: _shard_state(optimizer.state[p], p) for p in replaced if p in optimizer.state}
    for group in optimizer.param_groups:
        given = group["params"]
        group["params"] = [current(p) for p in given]
        for name in [name for name, value in vars(optimizer).items() if value is given]:
            setattr(optimizer, name, group["params"])  # LBFGS steps with an attribute that is this list
    for parameter, value in state.items():
        del optimizer.state[parameter]
        optimizer.state[current(parameter)] = value


def _shard_state(state: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(parameter, ReplacedParameter):
        raise ConfigError(
            "an optimizer that was made inside of full_params() has state of a parameter that tensor parallelism has "
            "split",
            where=vars(parameter)[_SUCCESSOR].name,
            instead="make the optimizer after it",
        )
    if not isinstance(state, dict):
        raise ConfigError(
            f"an optimizer holds state of type {type(state).__name__}, which cannot be sharded",
            where=parameter.param.name,
            instead="make the optimizer after the first call of the compiled model",
        )

    return {key: _shard_value(key, value, parameter) for key, value in state.items()}


def _shard_value(key: str, value: Any, parameter: ReplacedParameter) -> Any:
    tensors = [v for v in tree_leaves(value) if isinstance(v, torch.Tensor) and not isinstance(v, DTensor)]
    if not tensors:
        return value
    if value is tensors[0] and value.shape == parameter.full_shape and not is_number(key, value.shape):
        return shard_like(value, parameter.param)
    if value is tensors[0] and (value.dim() == 0 or is_number(key, value.shape)):
        return value
    raise ConfigError(
        f"an optimizer holds state {key!r}, which is not of its parameter's shape and cannot be sharded",
        where=parameter.param.name,
        instead="make the optimizer after the first call of the compiled model",
    )


def shard_like(value: torch.Tensor, param: FSDPParam) -> DTensor:
    """This rank's part of a full tensor that every rank has, laid out as the parameter is; no communication."""
    # A clone: a view would keep the memory of the full tensor.
    return make_dtensor(param.own_part(value).clone(memory_format=torch.contiguous_format), param.dtensor)
