"""`flat_step`: an optimizer that updates the memory of shards, not one DTensor after the other.

torch's optimizers treat each DTensor by itself, and every operator on it goes through DTensor's dispatch. Elementwise
optimizers need not know where a parameter ends: during a step they see plain tensors, one for each run of parameters
that are neighbours in memory (`flat_runs.py`).
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import local_tensor
from fsdp_compile.errors import ConfigError
from fsdp_compile.optim.flat_runs import Run, State, neighbours

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
)
"""torch's optimizers whose update of an element depends on that element's value, gradient and state alone."""
_FLAT = "_fsdp_flat"
Chosen = TypeVar("Chosen", bound=optim.Optimizer)


def require_elementwise(optimizer: optim.Optimizer, *, where: str) -> None:
    """Raises `ConfigError` for an optimizer that is not known to update each element by itself."""
    if type(optimizer) not in ELEMENTWISE:
        raise ConfigError(
            f"{type(optimizer).__name__} is not known to update each element independently",
            where=where,
            instead=f"one of {', '.join(c.__name__ for c in ELEMENTWISE)}; or elementwise=True if you are sure",
        )


def flat_step(optimizer: Chosen, *, elementwise: bool = False) -> Chosen:
    """Makes `optimizer.step()` update the memory of shards: the same bits, in less time for small parameters.

    Groups keep their settings: parameters that are neighbours in memory are updated together if they are in one group
    and have gradients. Parameters, `param_groups`, `state` and state dicts do not change, with each parameter's state a
    DTensor; hooks of the optimizer's step see the plain tensors. Parameters that are not sharded are updated as before.

    Args:
        optimizer: One of torch's elementwise optimizers, of a sharded model. It is changed.
        elementwise: Asserts of any other optimizer that its update of an element depends on the value, the gradient and
            the state of that element alone.

    Returns:
        `optimizer`.

    Raises:
        ConfigError: For an optimizer that is not known to be elementwise.
    """
    if not elementwise:
        require_elementwise(optimizer, where="flat_step(optimizer)")
    if _FLAT not in vars(optimizer):
        flat = FlatStep(optimizer.step)

        def step(self: optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return flat.step(self, closure)

        setattr(optimizer, _FLAT, flat)
        # A method, since learning rate schedulers wrap `step.__func__`.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


class FlatStep:
    """The runs of one optimizer, whose own step is `inner`."""

    def __init__(self, inner: Callable[[], Any]) -> None:
        self._inner = inner
        self._runs: dict[int, tuple[list[Any], list[Run]]] = {}

    @torch.compiler.disable
    def step(self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None) -> float | None:
        """One step, in which the optimizer sees runs in the place of parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                # The closure runs before anything is replaced: it sees the parameters.
                loss = closure()
        groups, state = optimizer.param_groups, optimizer.state
        given: list[list[nn.Parameter]] = [group["params"] for group in groups]
        found = [self._runs_of(number, parameters, state) for number, parameters in enumerate(given)]
        runs = {run.tensor: run for each in found for run in each}
        hidden = {param for run in runs.values() for param in run.params}
        optimizer.state = collections.defaultdict(dict, {p: s for p, s in state.items() if p not in hidden})
        optimizer.state.update({tensor: run.state for tensor, run in runs.items()})
        try:
            for group, parameters, each in zip(groups, given, found, strict=True):
                whole = [p for p in parameters if p.grad is not None and p not in hidden]
                group["params"] = [*(run.tensor for run in each), *whole]
            self._inner()
        finally:
            for group, parameters in zip(groups, given, strict=True):
                group["params"] = parameters
            state.update({p: s for p, s in optimizer.state.items() if p not in runs})
            optimizer.state = state
            for run in runs.values():
                run.drop_gradient()
                run.show(state)
        return loss

    def _runs_of(self, number: int, parameters: Sequence[nn.Parameter], state: State) -> list[Run]:
        """The runs of a group's sharded parameters that have gradients: those of the last step if nothing changed."""
        trained = [p for p in parameters if isinstance(p, DTensor) and _has_plain_memory(p)]
        # Not by number: what has gone may have left its number to another one.
        key = [(p, local_tensor(p), p.grad.dtype) for p in trained if p.grad is not None]
        before, runs = self._runs.get(number, ([], []))
        if not _are_same(before, key) or not all(run.is_known(state) for run in runs):
            runs = [Run(params, state) for params in neighbours(trained, state)]
        for run in runs:
            run.take_gradient()
        self._runs[number] = (key, runs)
        return runs


def _has_plain_memory(param: DTensor) -> bool:
    """Whether a parameter and its gradient are this rank's plain tensors: subclasses have operators of their own."""
    gradient = param.grad
    if not isinstance(gradient, DTensor) or gradient.placements != param.placements:
        return False
    return {type(local_tensor(param)), type(local_tensor(gradient))} <= {torch.Tensor}


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        a is b for each, match in zip(one, other, strict=True) for a, b in zip(each, match, strict=True)
    )
