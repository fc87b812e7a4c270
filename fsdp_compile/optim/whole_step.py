"""`whole_step`: an optimizer that sees full parameters, each on the rank that owns it.

Optimizers that look at norms, rows or products of a whole matrix compute something else on its shards, or nothing that
torch can do with DTensors. During a step they see plain tensors: each parameter is sent with its gradient and its state
to one rank, which updates it (`owners.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import optim
from torch.distributed.tensor import DTensor

from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.shards import torch_params
from fsdp_compile.fsdp2.stale import SEES_WHOLE
from fsdp_compile.optim.flat_step import ELEMENTWISE, Chosen, FlatStep, replace_step
from fsdp_compile.optim.owners import Cost, Owners, matrix_cost, place_of
from fsdp_compile.optim.updates import GroupRuns, Job, Updates

PER_PARAMETER = (*ELEMENTWISE, optim.ASGD, optim.Adafactor, optim.Muon)
"""torch's optimizers whose update of a parameter depends on that parameter's value, gradient and state alone."""
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
        by_group = elementwise or (lambda _: type(optimizer) in ELEMENTWISE)
        replace_step(optimizer, SEES_WHOLE, _WholeStep(optimizer.step, by_group, cost))
    return optimizer


class _WholeStep:
    """The steps of one optimizer, whose own step is `inner`."""

    def __init__(self, inner: Callable[[], Any], elementwise: IsElementwise, cost: Cost) -> None:
        self._inner, self._elementwise, self._cost = inner, elementwise, cost
        self._flat = FlatStep(inner)
        self._order: dict[Any, int] = {}

    def __call__(self, optimizer: optim.Optimizer) -> None:
        """One step, in which the optimizer's own runs for each parameter that this rank owns, and for all others."""
        groups, state = optimizer.param_groups, optimizer.state
        given = [group["params"] for group in groups]
        runs = [GroupRuns(optimizer, self._inner, group) for group in groups]
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
                self._flat(optimizer)
        finally:
            optimizer.param_groups, optimizer.state = groups, state
            for group, parameters in zip(groups, given, strict=True):
                group["params"] = parameters

    @torch.no_grad()
    def _update_whole(self, runs: Sequence[GroupRuns], state: Any) -> None:
        """Updates the sharded parameters of some groups."""
        jobs = self._jobs(runs, state)
        updates = Updates(jobs)
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

    def _jobs(self, runs: Sequence[GroupRuns], state: Any) -> dict[Job, GroupRuns]:
        """What is to be updated, in one order on all ranks, with the group that it is in."""
        held = {p: run for run in runs for p in run.group["params"] if isinstance(p, DTensor) and p.grad is not None}
        if not self._order.keys() >= held.keys():
            # Ranks need not list parameters in one order; FSDP2 has one.
            self._order = {p: number for number, p in enumerate(dict.fromkeys([*torch_params(held), *held]))}
        ordered = sorted(held, key=self._order.__getitem__)
        return {Job(number, p, state.get(p, {})): held[p] for number, p in enumerate(ordered)}
