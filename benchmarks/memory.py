"""Peak memory of a step, measured, beside what `explain` predicted before the model was sharded.

`fsdp_compile` is measured without a budget, with the least that is accepted, and with a quarter more than that. All
three are planned for a link (`--gb-per-s`) so slow that a plan makes use of all the memory that it is given.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import contenders, models
from benchmarks.command import Columns, finish, mib, parser, percent, quiet, table
from benchmarks.contenders import OURS, Contender, Setup
from benchmarks.hardware import plan_of, told
from benchmarks.measure import explained
from benchmarks.models import Task
from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.wire import Link
from benchmarks.peak import held_bytes, measured_peak_bytes
from benchmarks.step_time import add_network_arguments
from benchmarks.steps import forget_compiles, prepare
from fsdp_compile.errors import BudgetTooSmallError

ROOMIER = 1.25
"""What the larger budget is of the least one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("memory", "Peak memory of a step: measured for all contenders, predicted for fsdp_compile.")
    add_network_arguments(made)
    made.add_argument(
        "--gb-per-s", type=float, default=0.2, metavar="X", help="link that fsdp_compile plans for (default: 0.2)"
    )
    arguments = made.parse_args(argv)
    quiet()
    task = models.llama(models.SMOKE if arguments.smoke else models.TWO_CORES)
    setup = told(Setup(task.block, options=arguments.fsdp_options), arguments.gb_per_s * 1e9, arguments.latency_us)
    rows = run(task, setup, arguments.ranks, arguments.contenders)
    columns: Columns = {
        "contender": str,
        "held_bytes": mib,
        "budget_bytes": mib,
        "peak_bytes": mib,
        "predicted_bytes": mib,
        "prediction_error": percent,
    }
    table("peak of one step: parameters, gradients, activations, inputs", rows, columns)
    return finish(arguments, {"ranks": arguments.ranks, "gb_per_s": arguments.gb_per_s}, rows)


def run(task: Task, setup: Setup, ranks: int, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measures all contenders.

    Args:
        task: What is trained.
        setup: What contenders may know.
        ranks: Emulated ranks.
        names: Contenders; all for `None`.
    """
    rows: list[dict[str, Any]] = []
    with emulated_world(ranks, Network(Link(bytes_per_s=1e15)), device=setup.device):
        for contender in contenders.chosen(names):
            rows += _with_budgets(task, setup, ranks) if contender is OURS else [_measured(contender, task, setup)]
    return rows


def least_budget_bytes(task: Task, setup: Setup, ranks: int) -> int:
    """The smallest `memory_budget_gb` that `explain` accepts, in bytes."""
    least_bytes = 1
    while True:
        try:
            plan_of(task, _within(setup, least_bytes), ranks)
        except BudgetTooSmallError as error:
            least_bytes = error.least_bytes
        else:
            return least_bytes


def _measured(contender: Contender, task: Task, setup: Setup) -> dict[str, Any]:
    """One contender alone: memory of another must not count."""
    forget_compiles()
    ready, failed = prepare([contender], task, setup)
    row: dict[str, Any] = {"contender": contender.name}
    for samples in failed.values():
        row |= samples.to_dict()
    for prepared in ready.values():
        prepared.step()
        prepared.model.zero_grad(set_to_none=True)
        row["held_bytes"] = held_bytes(prepared.model, task.inputs)
        row["peak_bytes"] = measured_peak_bytes(prepared.model, task.inputs, prepared.step, setup.device)
    return row


def _with_budgets(task: Task, setup: Setup, ranks: int) -> Iterator[dict[str, Any]]:
    """`fsdp_compile` without a budget, and with two."""
    yield _predicted(task, setup, ranks)
    if setup.options.get("prefetch", "auto") != "auto":  # a fixed distance takes no budget
        return
    least_bytes = least_budget_bytes(task, setup, ranks)
    for budget_bytes in (least_bytes, round(least_bytes * ROOMIER)):
        yield {**_predicted(task, _within(setup, budget_bytes), ranks), "budget_bytes": budget_bytes}


def _predicted(task: Task, setup: Setup, ranks: int) -> dict[str, Any]:
    """Measured, with what `explain` says of the plain model, or why it says nothing."""
    try:
        predicted_bytes = plan_of(task, setup, ranks).peak_bytes
    except Exception as error:
        return {**_measured(OURS, task, setup), "prediction_failed": explained(error)}
    row = {**_measured(OURS, task, setup), "predicted_bytes": predicted_bytes}
    if "peak_bytes" in row:
        row["prediction_error"] = predicted_bytes / row["peak_bytes"] - 1
    return row


def _within(setup: Setup, budget_bytes: int) -> Setup:
    return dataclasses.replace(setup, options={**setup.options, "memory_budget_gb": budget_bytes / 1e9})


if __name__ == "__main__":
    sys.exit(main())
