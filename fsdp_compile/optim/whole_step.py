"""`whole_step`: an optimizer that sees full parameters, each on the rank that owns it.

Optimizers that look at norms, rows or products of a whole matrix compute something else on its shards, or nothing that
torch can do with DTensors. During a step they see plain tensors: each parameter is sent with its gradient and its state
to one rank, which updates it (`owners.py`).
"""

from __future__ import annotations

import collections
import functools
import pickle
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.autograd import allow_any_gradient_dtype
from fsdp_compile._torch.tensors import local_tensor, tree_map
from fsdp_compile.errors import ConfigError, RankFailedError
from fsdp_compile.fsdp2.shards import full_value, is_number, own_part, shard_like, torch_params
from fsdp_compile.fsdp2.stale import SEES_WHOLE
from fsdp_compile.optim.flat_step import ELEMENTWISE, FlatStep
from fsdp_compile.optim.group_values import Rewound, Values, difference, values_of
from fsdp_compile.optim.owners import Cost, Job, Owners, matrix_cost, place_of

PER_PARAMETER = (*ELEMENTWISE, optim.ASGD, optim.Adafactor, optim.Muon)
"""torch's optimizers whose update of a parameter depends on that parameter's value, gradient and state alone."""
Chosen = TypeVar("Chosen", bound=optim.Optimizer)
IsElementwise = Callable[[dict[str, Any]], bool]


def whole_step(
    optimizer: Chosen,
    *,
    per_parameter: bool = False,
    elementwise: IsElementwise | None = None,
    cost: Cost = matrix_cost,
) -> Chosen:
    """Makes `optimizer.step()` update each parameter as a whole on one rank, with the numbers of one process.

    For Adafactor, Muon and others that look at whole matrices. Parameters are divided among the ranks such that all
    take about as long; parts are sent to their owners, and the results back, while other parameters are updated. State
    that is not a number is kept sharded, as DTensors. Parameters of other layouts (tensor parallel, subclasses) are
    gathered one by one and updated on every rank; those that are not sharded are updated as before. Hooks of the
    optimizer's step run once for each sharded parameter on its owner, and once for all others. All ranks step together.

    Args:
        optimizer: Of a sharded model. It is changed.
        per_parameter: Asserts of an optimizer that is not torch's that its update of a parameter depends on the value,
            the gradient and the state of that parameter alone, and on what its group says, as a count of steps.
        elementwise: Says of a group of the optimizer whether it is updated element by element (the AdamW half of a
            Muon of another library): such a group is updated on shards, as by `flat_step`.
        cost: How long the update of a parameter takes, by its shape and in any unit; the same on all ranks.

    Returns:
        `optimizer`.

    Raises:
        ConfigError: For an optimizer that is not known to update each parameter by itself; in a step, on all ranks, if
            it shows that it does not.
        RankFailedError: In a step, if an update failed on another rank; values are undefined then.
    """
    if not per_parameter and type(optimizer) not in PER_PARAMETER:
        raise ConfigError(
            f"{type(optimizer).__name__} is not known to update each parameter independently",
            where="whole_step(optimizer)",
            instead=f"one of {', '.join(c.__name__ for c in PER_PARAMETER)}; or per_parameter=True if you are sure",
        )
    if SEES_WHOLE not in vars(optimizer):
        if elementwise is None:
            elementwise = _all if type(optimizer) in ELEMENTWISE else _none
        whole = _WholeStep(optimizer.step, elementwise, cost)

        def step(self: optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return whole.step(self, closure)

        setattr(optimizer, SEES_WHOLE, True)
        # A method, since learning rate schedulers wrap `step.__func__`.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


def _all(_group: dict[str, Any]) -> bool:
    return True


def _none(_group: dict[str, Any]) -> bool:
    return False


class _WholeStep:
    """The steps of one optimizer, whose own step is `inner`."""

    def __init__(self, inner: Callable[[], Any], elementwise: IsElementwise, cost: Cost) -> None:
        self._inner, self._elementwise, self._cost = inner, elementwise, cost
        self._flat = FlatStep(inner)
        self._order: dict[Any, int] = {}

    @torch.compiler.disable
    def step(self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
        """One step, in which the optimizer's own runs for each parameter that this rank owns, and for all others."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups, state = optimizer.param_groups, optimizer.state
        given = [group["params"] for group in groups]
        runs = [_GroupRuns(optimizer, self._inner, group, groups) for group in groups]
        whole = [run for run, group in zip(runs, groups, strict=True) if not self._elementwise(group)]
        try:
            self._update_whole(whole, state)
            others = []
            for run, parameters in zip(runs, given, strict=True):
                is_left = (lambda p: not isinstance(p, DTensor)) if run in whole else (lambda _: True)
                run.group["params"] = list(filter(is_left, parameters))
                if run.group["params"]:
                    run.rewind()
                    others.append(run.group)
            if others:
                optimizer.param_groups, optimizer.state = others, state
                self._flat.step(optimizer, None)
        finally:
            optimizer.param_groups, optimizer.state = groups, state
            for group, parameters in zip(groups, given, strict=True):
                group["params"] = parameters
        return loss

    @torch.no_grad()
    def _update_whole(self, runs: Sequence[_GroupRuns], state: Any) -> None:
        """Updates the sharded parameters of some groups."""
        jobs = self._jobs(runs, state)
        updates = _Updates(jobs)
        sent: dict[Any, list[Job]] = {}
        for job in jobs:
            place = place_of(job.parameter, job.state)
            if place is None:
                updates.update_everywhere(job)
            else:
                sent.setdefault(place, []).append(job)
        # The largest mesh last: all ranks hear there of what has failed on others.
        for place, each in sorted(sent.items(), key=lambda item: item[0][0].size()):
            updates.begin(each)
            mesh, across, device = place
            Owners(mesh, across, device, self._cost).run(each, updates)
        updates.end()
        state.update({job.parameter: job.state for job in jobs})

    def _jobs(self, runs: Sequence[_GroupRuns], state: Any) -> dict[Job, _GroupRuns]:
        """What is to be updated, in one order on all ranks, with the group that it is in."""
        held = {p: run for run in runs for p in run.group["params"] if isinstance(p, DTensor) and p.grad is not None}
        if not self._order.keys() >= held.keys():
            # Ranks need not list parameters in one order; FSDP2 has one.
            self._order = {p: number for number, p in enumerate(dict.fromkeys([*torch_params(held), *held]))}
        ordered = sorted(held, key=self._order.__getitem__)
        return {Job(number, p, state.get(p, {})): held[p] for number, p in enumerate(ordered)}


class _Updates:
    """The updates that this rank makes of parameters that it owns, and what ranks tell one another of them."""

    def __init__(self, runs: Mapping[Job, _GroupRuns]) -> None:
        self._runs = runs
        self._jobs: Sequence[Job] = ()
        self._failure: Exception | None = None
        self.said: dict[Any, Any] = {}

    def begin(self, jobs: Sequence[Job]) -> None:
        """Before the updates of one mesh: numbers those that its ranks have in common."""
        self._jobs = jobs
        for number, job in enumerate(jobs):
            job.number = number
        self.said = {} if self._failure is None else {("failed", dist.get_rank()): self._text()}

    def _text(self) -> str:
        return f"{type(self._failure).__name__}: {self._failure}"

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Keeps the first error until all have ended: the other ranks wait for this one."""
        try:
            yield
        except Exception as error:  # whatever it is
            if self._failure is None:
                self._failure = error
                self.said["failed", dist.get_rank()] = self._text()

    def update(
        self, job: Job, values: torch.Tensor, gradient: torch.Tensor, state: dict[Any, Any]
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Updates one parameter; raises what has failed before."""
        if self._failure is not None:
            raise self._failure
        run = self._runs[job]
        made = run.update(values, gradient, state)
        self.said["changed", job.number] = run.changed()
        pickle.dumps(self.said["changed", job.number])  # an error here is this rank's alone
        return made

    def update_everywhere(self, job: Job) -> None:
        """Updates a parameter that is gathered on all ranks of its mesh, on each of them."""
        gradient, run = job.parameter.grad, self._runs[job]
        assert isinstance(gradient, DTensor)
        old = tree_map(lambda leaf: full_value(leaf) if isinstance(leaf, DTensor) else leaf, job.state)
        values, gradient = full_value(job.parameter), full_value(gradient)
        with self.guarded():
            values, state = run.update(values, gradient, old)
            run.hear(run.changed())
            local_tensor(job.parameter).copy_(own_part(values, job.parameter))
            sharded = functools.partial(_sharded, parameter=job.parameter)
            job.state = {key: tree_map(functools.partial(sharded, key), value) for key, value in state.items()}

    def hear(self, heard: dict[Any, Any]) -> None:
        """Takes what all ranks of a mesh have said."""
        for (what, number), value in sorted(heard.items()):
            with self.guarded():
                if what == "failed" and number != dist.get_rank():
                    raise RankFailedError(f"rank {number} failed in its update: {value}", where="optimizer.step()")
                if what == "changed":
                    self._runs[self._jobs[number]].hear(value)

    def end(self) -> None:
        """Raises what has failed, here or on a rank that has told this one."""
        if self._failure is not None:
            raise self._failure


class _GroupRuns:
    """A group of the optimizer, whose step runs for one parameter after the other, each time from the same entries."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        inner: Callable[[], Any],
        group: dict[str, Any],
        groups: Sequence[dict[str, Any]],
    ) -> None:
        self._optimizer, self._inner, self.group = optimizer, inner, group
        self._others = [each for each in groups if each is not group]
        self._before, self._rewound = values_of(group), Rewound(group)
        self._left: Values | None = None

    def rewind(self) -> None:
        """Puts back the entries that the group had at first."""
        self._rewound.rewind()

    def update(
        self, values: torch.Tensor, gradient: torch.Tensor, state: dict[Any, Any]
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Runs the optimizer's step for one full parameter; returns its values and its state."""
        whole = nn.Parameter(values)
        if gradient.dtype != whole.dtype:
            allow_any_gradient_dtype(whole)
        whole.grad = gradient
        self.rewind()
        self._optimizer.state = collections.defaultdict(dict, {whole: state} if state else {})
        self._optimizer.param_groups = [self.group]
        self.group["params"] = [whole]
        self._inner()
        if whole.shape != values.shape:
            raise ConfigError(
                f"{type(self._optimizer).__name__} has given a parameter of shape {tuple(values.shape)} the shape "
                f"{tuple(whole.shape)}",
                where="whole_step(optimizer)",
                instead="an optimizer that keeps shapes",
            )
        return whole.detach().to(values.dtype), dict(self._optimizer.state[whole])

    def changed(self) -> Values:
        """The entries of the group that a step has changed."""
        now, before = values_of(self.group), self._before
        kept = [key for key in now if key in before and difference({key: now[key]}, {key: before[key]}) is None]
        return {key: _on_host(value) for key, value in now.items() if key not in kept}

    def hear(self, changed: Values) -> None:
        """Follows what an update, here or on another rank, has changed in the group.

        Raises:
            ConfigError: If it is something else than for another parameter, or changes another group, too.
        """
        if self._left is None:
            self._left = changed
            for key, value in changed.items():
                held = self.group.get(key)
                if isinstance(held, torch.Tensor) and any(held is other.get(key) for other in self._others):
                    raise ConfigError(
                        f"{type(self._optimizer).__name__} writes into {key!r}, one tensor of several groups",
                        where="whole_step(optimizer, per_parameter=True)",
                        instead="a tensor of its own in each group, or a number",
                    )
                if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor):
                    held.detach().copy_(value)
                else:
                    self.group[key] = value
        differs = difference(changed, self._left)
        if differs is not None:
            raise ConfigError(
                f"{type(self._optimizer).__name__} writes {differs!r} into its group, and another value for each "
                "parameter: its update looks at several parameters together",
                where="whole_step(optimizer, per_parameter=True)",
                instead="an optimizer whose update of a parameter depends only on that parameter; or this one without "
                "whole_step, where torch has its operators for DTensors",
            )


def _on_host(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, value)


def _sharded(key: str, value: Any, *, parameter: DTensor) -> Any:
    """A value of the new state as it is kept: this rank's part of what has the parameter's shape."""
    is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    return shard_like(value, parameter) if is_like and not is_number(key, value) else value
