"""Peak memory of a step, measured, beside what `explain` predicted before the model was sharded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import fsdp_compile
from benchmarks import contenders, models
from benchmarks.command import finish, mib, parser, percent, quiet, table
from benchmarks.contenders import OURS, Setup
from benchmarks.measure import explained
from benchmarks.models import Task
from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.wire import Link
from benchmarks.peak import held_bytes, measured_peak_bytes
from benchmarks.step_time import add_network_arguments
from benchmarks.steps import prepare


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("memory", "Peak memory of a step: measured for all contenders, predicted for fsdp_compile.")
    add_network_arguments(made)
    arguments = made.parse_args(argv)
    quiet()
    task = models.llama(models.SMOKE if arguments.smoke else models.TWO_CORES)
    rows = run(task, Setup(task.block, options=arguments.fsdp_options), arguments.ranks, arguments.contenders)
    table(
        "peak of one step: parameters, gradients, activations, inputs",
        rows,
        {"contender": str, "held_bytes": mib, "peak_bytes": mib, "predicted_bytes": mib, "prediction_error": percent},
    )
    return finish(arguments, {"ranks": arguments.ranks}, rows)


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
        predicted = predict(task, setup, ranks)
        for contender in contenders.chosen(names):
            # One at a time: another contender's memory must not count.
            ready, failed = prepare([contender], task, setup)
            row: dict[str, Any] = {"contender": contender.name}
            for samples in failed.values():
                row |= samples.to_dict()
            for prepared in ready.values():
                prepared.step()
                prepared.model.zero_grad(set_to_none=True)
                row["held_bytes"] = held_bytes(prepared.model, task.inputs)
                row["peak_bytes"] = measured_peak_bytes(prepared.model, task.inputs, prepared.step, setup.device)
            if contender is OURS:
                row |= predicted
                if "peak_bytes" in row and "predicted_bytes" in row:
                    row["prediction_error"] = row["predicted_bytes"] / row["peak_bytes"] - 1
            rows.append(row)
    return rows


def predict(task: Task, setup: Setup, ranks: int) -> dict[str, Any]:
    """What `explain` says of the plain model, or why it says nothing."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    positional, keywords = task.inputs
    options = {**setup.options, "mp_policy": MixedPrecisionPolicy(param_dtype=setup.param_dtype)}
    try:
        plan = fsdp_compile.explain(task.make(), *positional, world_size=ranks, options=options, **keywords)
    except Exception as error:
        return {"prediction_failed": explained(error)}
    return {"predicted_bytes": plan.peak_bytes}


if __name__ == "__main__":
    sys.exit(main())
