"""What budgets cost that do not hold the activations: blocks are computed again in backward.

Budgets lie between the least that is enough if all activations are saved, and the least if all blocks are computed
again. The model needs no change for either.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import models
from benchmarks.command import Columns, finish, mib, ms, parser, percent, quiet, table
from benchmarks.contenders import OURS, Setup
from benchmarks.hardware import plan_of, told
from benchmarks.measure import alternate, median_ratio
from benchmarks.memory import least_budget_bytes
from benchmarks.models import Task
from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.wire import Link
from benchmarks.peak import measured_peak_bytes
from benchmarks.steps import Prepared, forget_compiles, prepare

UNLIMITED = "unlimited"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("activations", "Step time and peak memory within budgets that do not hold all activations.")
    made.add_argument("--ranks", type=int, default=8, metavar="N", help="emulated ranks (default: 8)")
    made.add_argument("--rounds", type=int, default=10, metavar="N", help="steps within each budget (default: 10)")
    made.add_argument("--lower", default="inductor", choices=["inductor", "eager"], help="as the option says")
    arguments = made.parse_args(argv)
    quiet()
    # More tokens than the other benchmarks have, so that activations are most of the memory.
    longer = dataclasses.replace(models.TWO_CORES, tokens=models.TWO_CORES.tokens * 2)
    task = models.llama(models.SMOKE if arguments.smoke else longer)
    rows = run(task, arguments.lower, arguments.ranks, 1 if arguments.smoke else arguments.rounds)
    columns: Columns = {
        "budget": str,
        "budget_bytes": mib,
        "predicted_bytes": mib,
        "peak_bytes": mib,
        "prediction_error": percent,
        "median_s": ms,
        "over_unlimited": lambda ratio: f"{ratio:.2f} x",
    }
    table("forward and backward, in turn; medians", rows, columns)
    return finish(arguments, {"ranks": arguments.ranks, "rounds": arguments.rounds}, rows)


def run(task: Task, lower: str, ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Trains a task without a budget and within three, over a link that takes no time; `lower` is the option."""
    link = Link(bytes_per_s=1e15)
    # Named, so that what is predicted is planned for the hardware that the run is planned for.
    setup = told(Setup(task.block, options={"lower": lower}), link.bytes_per_s, latency_us=0.0)
    with emulated_world(ranks, Network(link), device=setup.device):
        budgets = dict(_budgets(task, setup, ranks))
        within = {name: _within(setup, budget) for name, budget in budgets.items()}
        peaks = {name: _peak_bytes(task, chosen) for name, chosen in within.items()}
        forget_compiles()
        ready = {name: _ready(task, chosen) for name, chosen in within.items()}
        times = alternate({name: prepared.step for name, prepared in ready.items()}, rounds=rounds)
        rows = []
        for name, samples in times.items():
            predicted = plan_of(task, within[name], ranks).peak_bytes
            rows.append(
                {
                    "budget": name,
                    "budget_bytes": budgets[name],
                    "predicted_bytes": predicted,
                    "peak_bytes": peaks[name],
                    "prediction_error": predicted / peaks[name] - 1,
                    **samples.to_dict(),
                    "over_unlimited": median_ratio(samples, times[UNLIMITED]),
                }
            )
    return rows


def _budgets(task: Task, setup: Setup, ranks: int) -> Iterator[tuple[str, int | None]]:
    saved = dataclasses.replace(setup, options={**setup.options, "activations": "saved"})
    most, least = (least_budget_bytes(task, chosen, ranks) for chosen in (saved, setup))
    yield from {UNLIMITED: None, "saved": most, "halfway": (most + least) // 2, "least": least}.items()


def _within(setup: Setup, budget_bytes: int | None) -> Setup:
    if budget_bytes is None:
        return setup
    return dataclasses.replace(setup, options={**setup.options, "memory_budget_gb": budget_bytes / 1e9})


def _ready(task: Task, setup: Setup) -> Prepared:
    ready, failed = prepare([OURS], task, setup)
    for samples in failed.values():
        raise RuntimeError(samples.error)
    return ready[OURS.name]


def _peak_bytes(task: Task, setup: Setup) -> int:
    """The measured peak of one step; memory of another model must not count."""
    forget_compiles()
    prepared = _ready(task, setup)
    prepared.model.zero_grad(set_to_none=True)
    return measured_peak_bytes(prepared.model, task.inputs, prepared.step, setup.device)


if __name__ == "__main__":
    sys.exit(main())
