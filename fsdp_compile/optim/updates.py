"""Updates of full parameters, one after the other, by an optimizer that takes lists of them."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.autograd import allow_any_gradient_dtype
from fsdp_compile._torch.tensors import local_tensor, tree_leaves, tree_map
from fsdp_compile.errors import ConfigError, RankFailedError
from fsdp_compile.fsdp2.shards import full_value, is_number, own_part, shard_like

Values = dict[str, Any]
"""Entries of a group of an optimizer but its parameters."""


@dataclasses.dataclass(eq=False)
class Job:
    """A parameter that is updated in this step.

    Attributes:
        number: Of the parameter, the same on all ranks.
        parameter: It is updated in place.
        state: Its state, and when the step ends the new one: DTensors, and what is the same on all ranks.
    """

    number: int
    parameter: DTensor
    state: dict[Any, Any]

    def sharded(self) -> list[DTensor]:
        """What of its state is sharded."""
        return [leaf for leaf in tree_leaves(self.state) if isinstance(leaf, DTensor)]

    def sent(self) -> list[DTensor]:
        """What goes to its owner."""
        assert isinstance(self.parameter.grad, DTensor)
        return [self.parameter, self.parameter.grad, *self.sharded()]

    def locals(self) -> list[torch.Tensor]:
        """What comes back from its owner: this rank's parts of the parameter and of the state."""
        return [local_tensor(each) for each in (self.parameter, *self.sharded())]


class Updates:
    """The updates that this rank makes of parameters that it owns, and what ranks tell one another of them.

    Attributes:
        said: What this rank tells the others.
    """

    def __init__(self, runs: Mapping[Job, GroupRuns]) -> None:
        self._runs = runs
        self._jobs: Sequence[Job] = ()
        self._failure: Exception | None = None
        self.said: dict[Any, Any] = {}

    def begin(self, jobs: Sequence[Job]) -> None:
        """Before the updates of one mesh: numbers those that its ranks have in common."""
        self._jobs = jobs
        for number, job in enumerate(jobs):
            job.number = number
        self.said = {}
        self._tell_failure()

    def _tell_failure(self) -> None:
        if self._failure is not None:
            self.said["failed", dist.get_rank()] = f"{type(self._failure).__name__}: {self._failure}"

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Keeps the first error until all have ended: the other ranks wait for this one."""
        try:
            yield
        except Exception as error:  # whatever it is
            if self._failure is None:
                self._failure = error
                self._tell_failure()

    def update(
        self, job: Job, values: torch.Tensor, gradient: torch.Tensor, state: dict[Any, Any]
    ) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Updates full values by a full gradient and state; returns the new ones. Raises what has failed before."""
        self.end()
        run = self._runs[job]
        made = run.update(values, gradient, state)
        self.said["changed", job.number] = run.changed()
        pickle.dumps(self.said["changed", job.number])  # an error here is this rank's alone
        return made

    def update_everywhere(self, job: Job) -> None:
        """Updates a parameter that is gathered on all ranks of its mesh, on each of them."""
        parameter, run = job.parameter, self._runs[job]
        assert isinstance(parameter.grad, DTensor)
        old = tree_map(lambda leaf: full_value(leaf) if isinstance(leaf, DTensor) else leaf, job.state)
        values, gradient = full_value(parameter), full_value(parameter.grad)

        def kept(key: Any, value: Any) -> Any:
            """Of what has the parameter's shape, this rank's part."""
            is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            return shard_like(value, parameter) if is_like and not is_number(key, value) else value

        with self.guarded():
            values, state = run.update(values, gradient, old)
            run.hear(run.changed())
            local_tensor(parameter).copy_(own_part(values, parameter))
            job.state = {key: tree_map(functools.partial(kept, key), value) for key, value in state.items()}

    def hear(self, heard: dict[Any, Any]) -> None:
        """Takes what all ranks of a mesh have said; of two values under one key that of an earlier rank."""
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


class GroupRuns:
    """A group of the optimizer, whose step runs for one parameter after the other, each time from the same entries.

    What is in place of the entries in the end is what one run has left: a counter of steps has counted once.
    """

    def __init__(self, optimizer: optim.Optimizer, inner: Callable[[], Any], group: dict[str, Any]) -> None:
        self._optimizer, self._inner, self.group = optimizer, inner, group
        self._others = [each for each in optimizer.param_groups if each is not group]
        self._entries = {key: value for key, value in group.items() if key != "params"}
        self._before = _values_of(group)
        self._left: Values | None = None

    def rewind(self) -> None:
        """Puts back the entries that the group had at first, the same tensors among them."""
        for key in self.group.keys() - self._entries.keys() - {"params"}:
            del self.group[key]
        for key, value in self._entries.items():
            if isinstance(value, torch.Tensor):
                value.detach().copy_(self._before[key])
                self.group[key] = value
            else:
                self.group[key] = _copied(self._before[key])

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
        """The entries of the group that a step has changed, on the host."""
        now = _values_of(self.group)
        new = {key: now[key] for key in _differing(now, self._before) if key in now}
        return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, new)

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
        differing = _differing(changed, self._left)
        if differing:
            raise ConfigError(
                f"{type(self._optimizer).__name__} writes {differing[0]!r} into its group, and another value for each "
                "parameter: its update looks at several parameters together",
                where="whole_step(optimizer, per_parameter=True)",
                instead="an optimizer whose update of a parameter depends only on that parameter; or this one without "
                "whole_step, where torch has its operators for DTensors",
            )


def _values_of(group: Values) -> Values:
    """The entries of a group but its parameters, as they are now."""
    return {key: _copied(value) for key, value in group.items() if key != "params"}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, list | dict | set) else value


def _differing(one: Values, other: Values) -> list[str]:
    """The names of entries that only one of them has, or that differ."""
    return [key for key in one | other if key not in one or key not in other or not _are_equal(one[key], other[key])]


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    return one is other or bool(one == other)
