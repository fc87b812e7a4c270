"""`flat_step`: an optimizer that updates flat parameters, not one parameter after the other.

torch's optimizers treat each DTensor by itself, and every operator on it goes through DTensor's dispatch. Elementwise
optimizers need not know where a parameter ends: during a step they see plain tensors, one for each run of neighbouring
parameters (`flat_runs.py`).
"""

from __future__ import annotations

import collections
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn, optim

from fsdp_compile._torch.tensors import local_tensor
from fsdp_compile.errors import ConfigError
from fsdp_compile.optim.flat_runs import Run, State, neighbours
from fsdp_compile.runtime import loaded_state
from fsdp_compile.runtime.optimizer_steps import OWN_PARAMS
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup

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


def flat_step(optimizer: Chosen, *, elementwise: bool = False) -> Chosen:
    """Makes `optimizer.step()` update whole flat parameters: the same bits, in less time for small parameters.

    Groups keep their settings: neighbours in one flat parameter are updated together if they are in one group and have
    gradients. Parameters, `param_groups`, `state` and state dicts do not change, with each parameter's state a DTensor;
    hooks of the optimizer's step see the plain tensors. Parameters that are not sharded are updated as before.

    Args:
        optimizer: One of torch's elementwise optimizers, made before or after the model was sharded. It is changed.
        elementwise: Asserts of any other optimizer that its update of an element depends on the value, the gradient and
            the state of that element alone.

    Returns:
        `optimizer`.

    Raises:
        ConfigError: For an optimizer that is not known to be elementwise.
    """
    if not elementwise and type(optimizer) not in ELEMENTWISE:
        raise ConfigError(
            f"{type(optimizer).__name__} is not known to update each element by itself",
            where="flat_step(optimizer)",
            instead=f"one of {', '.join(c.__name__ for c in ELEMENTWISE)}; or elementwise=True if you are sure",
        )
    if _FLAT not in vars(optimizer):
        flat = FlatStep(optimizer.step)

        def step(self: optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return flat.step(self, closure)

        setattr(optimizer, _FLAT, flat)
        # A method, since learning rate schedulers wrap `step.__func__`.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


def flat_step_of(optimizer: optim.Optimizer) -> FlatStep:
    """The `FlatStep` of an optimizer."""
    found: FlatStep = vars(optimizer)[_FLAT]
    return found


Places = list[tuple[FSDPParamGroup, FSDPParam]]
Shown = list[tuple[list[Run], list[nn.Parameter]]]
"""For each group, the runs of its sharded parameters, and its other parameters."""


class FlatStep:
    """The runs of one optimizer, whose own step is `inner`."""

    def __init__(self, inner: Callable[[], Any]) -> None:
        self._inner = inner
        # With units on the host and on a device, updates in backward run on autograd's threads for both.
        self._lock = threading.RLock()
        self._runs: dict[tuple[int, FSDPParamGroup | None], tuple[tuple[int, ...], list[Run]]] = {}
        self._places: list[tuple[tuple[int, ...], Places]] = []
        self._groups: tuple[list[list[nn.Parameter]], list[int], dict[nn.Parameter, int]] = ([], [], {})

    def step(self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None) -> float | None:
        """One step, in which the optimizer sees runs in the place of parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                # The closure runs before anything is replaced: it sees the parameters.
                loss = closure()
        with self._lock:
            loaded_state.prepare(optimizer)
            state = optimizer.state
            given = [group["params"] for group in optimizer.param_groups]
            shown = [self._runs_of(number, parameters, state) for number, parameters in enumerate(given)]
            hidden = {param.parameter for found, _ in shown for run in found for param in run.params}
            self._run(optimizer, given, shown, {p: s for p, s in state.items() if p not in hidden})
        return loss

    def update(self, optimizer: optim.Optimizer, flat: FSDPParamGroup) -> list[FSDPParam]:
        """Steps the parameters of one flat parameter that have gradients, and returns them."""
        with self._lock:
            loaded_state.check(optimizer)
            numbers = self._group_numbers(optimizer)
            if any(param.parameter.grad is not None and param.parameter not in numbers for param in flat.params):
                loaded_state.prepare(optimizer)  # it may hold parameters that were sharded since
                numbers = self._group_numbers(optimizer)
            groups: list[Places] = [[] for _ in optimizer.param_groups]
            for param in flat.params:
                if param.parameter.grad is not None and param.parameter in numbers:
                    groups[numbers[param.parameter]].append((flat, param))
            others: dict[Any, Any] = {}
            if flat.is_extended:  # no views of one tensor: the optimizer sees the parameters
                shown: Shown = [([], [param.parameter for _, param in trained]) for trained in groups]
                others = {p: optimizer.state[p] for _, each in shown for p in each if p in optimizer.state}
            else:
                shown = [(self._cut((n, flat), trained, optimizer.state), []) for n, trained in enumerate(groups)]
            self._run(optimizer, (), shown, others)
        return [param for trained in groups for _, param in trained]

    def _run(
        self, optimizer: optim.Optimizer, own: Sequence[list[nn.Parameter]], shown: Shown, others: Mapping[Any, Any]
    ) -> None:
        """Runs the optimizer's own step on `shown`, with `others` as further state; `own` is what it is counted for."""
        groups, state = optimizer.param_groups, optimizer.state
        given = [group["params"] for group in groups]
        runs = {run.tensor: run for found, _ in shown for run in found}
        optimizer.state = collections.defaultdict(dict, others)
        optimizer.state.update({tensor: run.state for tensor, run in runs.items()})
        setattr(optimizer, OWN_PARAMS, own)
        try:
            for group, (found, whole) in zip(groups, shown, strict=True):
                group["params"] = [*(run.tensor for run in found), *whole]
            self._inner()
        finally:
            delattr(optimizer, OWN_PARAMS)
            for group, parameters in zip(groups, given, strict=True):
                group["params"] = parameters
            state.update({p: s for p, s in optimizer.state.items() if p not in runs})
            optimizer.state = state
            for run in runs.values():
                run.drop_gradient()
                run.show(state)

    def _runs_of(
        self, number: int, parameters: Sequence[nn.Parameter], state: State
    ) -> tuple[list[Run], list[nn.Parameter]]:
        """The runs of a group's sharded parameters that have gradients, and its other parameters."""
        places = self._places_of(number, parameters)
        sharded = {param.parameter for _, param in places}
        trained = [(flat, param) for flat, param in places if param.parameter.grad is not None]
        return self._cut((number, None), trained, state), [p for p in parameters if p not in sharded]

    def _cut(self, place: tuple[int, FSDPParamGroup | None], trained: Places, state: State) -> list[Run]:
        """Runs of parameters that have gradients: those of the last step if nothing has changed."""
        key = tuple(id(param) for _, param in trained)
        before, runs = self._runs.get(place, ((), []))
        if before != key or not all(run.is_known(state) for run in runs):
            runs = [Run(params, state) for params in neighbours(trained, state)]
            self._forget_old_shards()
        if not _take_gradients(runs):
            # Gradients were replaced by the user: each parameter is a run of its own from now on.
            runs = [Run([param], state) for run in runs for param in run.params]
            _take_gradients(runs)
        self._runs[place] = (key, runs)
        return runs

    def _forget_old_shards(self) -> None:
        # Their units were laid out anew: these groups are not used any more.
        for place in [
            place for place in self._runs if place[1] is not None and place[1] not in place[1].unit.param_groups
        ]:
            del self._runs[place]

    def _group_numbers(self, optimizer: optim.Optimizer) -> dict[nn.Parameter, int]:
        """The number of each parameter's group; computed again only if a group has another list, or a longer one."""
        lists = [group["params"] for group in optimizer.param_groups]
        lengths = list(map(len, lists))
        held, counted, numbers = self._groups
        if counted != lengths or any(one is not other for one, other in zip(lists, held, strict=True)):
            numbers = {parameter: number for number, group in enumerate(lists) for parameter in group}
            self._groups = (lists, lengths, numbers)
        return numbers

    def _places_of(self, number: int, parameters: Sequence[nn.Parameter]) -> Places:
        """A group's sharded parameters with their parameter groups, as they lie in memory."""
        key = tuple(map(id, parameters))
        while len(self._places) <= number:
            self._places.append(((), []))
        before, places = self._places[number]
        if before != key or any(local_tensor(param.dtensor) is not param.sharded_view for _, param in places):
            wanted = {p: i for i, p in enumerate(parameters)}
            in_use = [f for f in FSDPParamGroup.alive() if f in f.unit.param_groups and not f.is_extended]
            found = [(flat, param) for flat in in_use for param in flat.params if param.parameter in wanted]
            first: dict[FSDPParamGroup, int] = {}
            for flat, _ in sorted(found, key=lambda place: wanted[place[1].parameter]):
                first.setdefault(flat, len(first))
            places = sorted(found, key=lambda place: (first[place[0]], place[1].spec.offset))
            self._places[number] = (key, places)
        return places


def _take_gradients(runs: Sequence[Run]) -> bool:
    taken = [run.take_gradient() for run in runs]
    return all(taken)
