"""Peak memory of a step beside what `explain` says of the graphs that ran, at several numbers of ranks.

The smallest budget is asked of the compile itself: its graphs have what this device saves for backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import fsdp_compile
from benchmarks import contenders
from benchmarks.contenders import Setup
from benchmarks.models import Task
from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.wire import Link
from benchmarks.peak import measured_peak_bytes
from benchmarks.steps import Prepared, forget_compiles
from fsdp_compile.errors import BudgetTooSmallError

WORLDS = (8, 64, 256)
_NO_ROOM_GB = 1e-9


def run(task: Task, setup: Setup, worlds: Sequence[int] = WORLDS) -> dict[str, Any]:
    """Measures a step in each world; in the first one also within the smallest budget that its graphs can keep."""
    rows: list[dict[str, Any]] = []
    for ranks in worlds:
        with emulated_world(ranks, Network(Link(bytes_per_s=1e15)), device=setup.device):
            rows.append({"ranks": ranks, **_measured(task, setup)})
            if ranks == worlds[0]:
                budget_gb = least_budget_gb(task, setup)
                rows.append({"ranks": ranks, "budget_gb": budget_gb, **_measured(task, _within(setup, budget_gb))})
    return {"rows": rows}


def least_budget_gb(task: Task, setup: Setup) -> float:
    """The smallest `memory_budget_gb` that a compile in this world accepts with all activations, by what it refuses."""
    budget_gb = _NO_ROOM_GB
    while True:
        try:
            _ready(task, _within(setup, budget_gb))
        except Exception as error:
            refused = next((e for e in _causes(error) if isinstance(e, BudgetTooSmallError)), None)
            if refused is None or refused.least_bytes <= budget_gb * 1e9:
                raise
            budget_gb = refused.least_bytes / 1e9
        else:
            return budget_gb


def _measured(task: Task, setup: Setup) -> dict[str, Any]:
    prepared = _ready(task, setup)
    prepared.step()
    prepared.model.zero_grad(set_to_none=True)
    peak_bytes = measured_peak_bytes(prepared.model, task.inputs, prepared.step, setup.device)
    predicted_bytes = fsdp_compile.explain(prepared.model).peak_bytes
    return {
        "peak_bytes": peak_bytes,
        "predicted_bytes": predicted_bytes,
        "prediction_error": predicted_bytes / peak_bytes - 1,
    }


def _ready(task: Task, setup: Setup) -> Prepared:
    forget_compiles()
    model = task.make()
    prepared = Prepared(model, contenders.ours(model, setup), task)
    prepared.step()
    return prepared


def _within(setup: Setup, budget_gb: float) -> Setup:
    options = {**setup.options, "memory_budget_gb": budget_gb, "activations": "saved"}
    return dataclasses.replace(setup, options=options)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it was made of; Dynamo wraps what a backend raises."""
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__
