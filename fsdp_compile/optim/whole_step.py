"""`whole_step`: an optimizer that sees one full parameter at a time.

Optimizers that look at norms, rows or products of a whole matrix compute something else on its shards, or nothing that
torch can do with DTensors. During a step they see plain tensors: each parameter is gathered with its gradient and its
state, updated on every rank alike, and cut into shards again.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.autograd import allow_any_gradient_dtype
from fsdp_compile._torch.tensors import local_tensor
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.shards import full_value, is_number, own_part, shard_like
from fsdp_compile.fsdp2.stale import SEES_WHOLE
from fsdp_compile.optim.flat_step import ELEMENTWISE
from fsdp_compile.optim.group_values import Rewound, Values, difference, values_of

PER_PARAMETER = (*ELEMENTWISE, optim.ASGD, optim.Adafactor, optim.Muon)
"""torch's optimizers whose update of a parameter depends on that parameter's value, gradient and state alone."""
Chosen = TypeVar("Chosen", bound=optim.Optimizer)


def whole_step(optimizer: Chosen, *, per_parameter: bool = False) -> Chosen:
    """Makes `optimizer.step()` update one full parameter after the other, with the numbers of one process.

    For Adafactor, Muon and others that look at whole matrices. A rank holds one full parameter at a time, with its
    gradient and its state, and every rank computes every update. State of a parameter's shape is kept sharded as
    DTensors; other state, as the rows and columns of Adafactor, is plain and the same on all ranks. Parameters that are
    not sharded are updated as before. Hooks of the optimizer's step run once for each sharded parameter, and once for
    all others. All ranks step together.

    Args:
        optimizer: Of a sharded model. It is changed.
        per_parameter: Asserts of an optimizer that is not torch's that its update of a parameter depends on the value,
            the gradient and the state of that parameter alone, and on what its group says, as a count of steps.

    Returns:
        `optimizer`.

    Raises:
        ConfigError: For an optimizer that is not known to update each parameter by itself; in a step, if it shows that
            it does not.
    """
    if not per_parameter and type(optimizer) not in PER_PARAMETER:
        raise ConfigError(
            f"{type(optimizer).__name__} is not known to update each parameter independently",
            where="whole_step(optimizer)",
            instead=f"one of {', '.join(c.__name__ for c in PER_PARAMETER)}; or per_parameter=True if you are sure",
        )
    if SEES_WHOLE not in vars(optimizer):
        inner = optimizer.step

        def step(self: optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return _step(self, inner, closure)

        setattr(optimizer, SEES_WHOLE, True)
        # A method, since learning rate schedulers wrap `step.__func__`.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


@torch.compiler.disable
def _step(optimizer: optim.Optimizer, inner: Callable[[], Any], closure: Callable[[], Any] | None) -> Any:
    """One step, in which the optimizer's own step `inner` runs for each sharded parameter, and for the others."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    groups, state = optimizer.param_groups, optimizer.state
    given = [group["params"] for group in groups]
    try:
        others = []
        for group, parameters in zip(groups, given, strict=True):
            optimizer.param_groups = [group]
            rewound, left = Rewound(group), None
            for parameter in parameters:
                if isinstance(parameter, DTensor) and parameter.grad is not None:
                    rewound.rewind()
                    state[parameter] = _update(optimizer, inner, parameter, state.get(parameter, {}))
                    left = _same_values(optimizer, group, left)
            group["params"] = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
            if group["params"]:
                rewound.rewind()
                others.append(group)
        if others:
            optimizer.param_groups, optimizer.state = others, state
            inner()
    finally:
        optimizer.param_groups, optimizer.state = groups, state
        for group, parameters in zip(groups, given, strict=True):
            group["params"] = parameters
    return loss


def _same_values(optimizer: optim.Optimizer, group: dict[str, Any], before: Values | None) -> Values:
    """What the update of a parameter has left in its group, which has to be the same for all parameters."""
    left = values_of(group)
    key = None if before is None else difference(left, before)
    if key is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} writes {key!r} into its group, and another value for each parameter: its "
            "update looks at several parameters together",
            where="whole_step(optimizer, per_parameter=True)",
            instead="an optimizer whose update of a parameter depends only on that parameter; or this one without "
            "whole_step, where torch has its operators for DTensors",
        )
    return left


@torch.no_grad()
def _update(
    optimizer: optim.Optimizer, inner: Callable[[], Any], parameter: DTensor, state: dict[Any, Any]
) -> dict[Any, Any]:
    """Updates one sharded parameter, of the only group that the optimizer has now; returns the new state."""
    whole = nn.Parameter(full_value(parameter))
    gradient = full_value(parameter.grad)  # type: ignore[arg-type]
    if gradient.dtype != whole.dtype:
        allow_any_gradient_dtype(whole)
    whole.grad = gradient
    full = {key: full_value(value) if isinstance(value, DTensor) else value for key, value in state.items()}
    optimizer.state = collections.defaultdict(dict, {whole: full} if full else {})
    optimizer.param_groups[0]["params"] = [whole]
    inner()
    local_tensor(parameter).copy_(own_part(whole, parameter))
    return {key: _sharded(key, value, parameter) for key, value in optimizer.state[whole].items()}


def _sharded(key: str, value: Any, parameter: DTensor) -> Any:
    """A value of the new state as it is kept: this rank's part of what has the parameter's shape."""
    is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    return shard_like(value, parameter) if is_like and not is_number(key, value) else value
