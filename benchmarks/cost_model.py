"""The cost model's error: predicted beside measured compute, collectives, step time and peak memory."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import contenders, models
from benchmarks.command import Columns, finish, parser, percent, quiet, table
from benchmarks.contenders import OURS, UNSHARDED, Setup
from benchmarks.hardware import measured, plan_of, told
from benchmarks.measure import Samples, alternate
from benchmarks.models import Task
from benchmarks.network.emulated import Network, World, emulated_world
from benchmarks.network.traffic import full_sharding_bytes
from benchmarks.network.wire import Link
from benchmarks.peak import measured_peak_bytes
from benchmarks.step_time import add_network_arguments
from benchmarks.steps import prepare
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.hardware import Hardware, share_of_others
from fsdp_compile.explain import Plan
from fsdp_compile.layout.hosts import GroupRanks

Row = dict[str, Any]
_CALLS: dict[Kind, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    Kind.GATHER: dist.all_gather_into_tensor,
    Kind.REDUCE: dist.reduce_scatter_tensor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("cost_model", "Predicted beside measured: compute, collectives, step time, peak memory.")
    add_network_arguments(made)
    made.add_argument("--threads", type=int, default=1, metavar="N", help="that compute (default: 1)")
    made.add_argument("--megabytes", type=float, nargs="+", default=[1, 8, 32], metavar="MB", help="of collectives")
    arguments = made.parse_args(argv)
    quiet()
    torch.set_num_threads(arguments.threads)
    if arguments.smoke:
        arguments.rounds, arguments.megabytes = 2, arguments.megabytes[:1]
    task = models.llama(models.SMOKE if arguments.smoke else models.TWO_CORES)
    setup = Setup(task.block, options=arguments.fsdp_options)
    rows, link = run(task, setup, arguments)
    numbers: Columns = {"predicted": _number, "measured": _number, "unit": str, "prediction_error": percent}
    table("predicted / measured - 1", rows, {"what": str, **numbers})
    settings = {key: value for key, value in vars(arguments).items() if key != "out"}
    return finish(arguments, {**settings, "bytes_per_s": link.bytes_per_s}, rows)


def run(task: Task, setup: Setup, arguments: Any) -> tuple[list[Row], Link]:
    """Measures, and predicts the same.

    The link is as fast as it must be for communication to take half of the time of compute.

    Args:
        task: What is trained.
        setup: What contenders may know.
        arguments: Ranks, rounds, latency, sizes.
    """
    ranks: int = arguments.ranks
    with emulated_world(ranks, Network(Link(bytes_per_s=1e15))) as world:
        ready, _ = prepare([UNSHARDED], task, setup)
        alone = alternate({"": ready[UNSHARDED.name].step}, rounds=arguments.rounds)[""]
        sent = full_sharding_bytes(models.parameter_bytes(task.make()), ranks)
        link = Link(sent / (0.5 * alone.median_s), arguments.latency_us * 1e-6)
        informed = told(setup, link.bytes_per_s, arguments.latency_us)
        roofline = plan_of(task, informed, ranks)
        known = measured(roofline, arguments.rounds)
        informed = dataclasses.replace(informed, options={**informed.options, "hardware": known})
        plans = {"roofline": roofline, "measured": plan_of(task, informed, ranks)}
        rows = [_row(f"compute, {name}", _compute_us(plan), alone, "us") for name, plan in plans.items()]
        ours, failed = prepare(contenders.chosen([OURS.name]), task, informed)
        rows += [{"what": "step", **samples.to_dict()} for samples in failed.values()]
        world.change(link)
        for prepared in ours.values():
            step = alternate({"": prepared.step}, rounds=arguments.rounds)[""]
            rows += [_row(f"step, {name}", plan.step_us, step, "us") for name, plan in plans.items()]
            prepared.model.zero_grad(set_to_none=True)
            peak = measured_peak_bytes(prepared.model, task.inputs, prepared.step, setup.device)
            rows.append(_compared("peak memory", plans["measured"].peak_bytes, peak, "byte"))
        rows += _collectives(world, ranks, known, arguments)
    return rows, link


def _compute_us(plan: Plan) -> float:
    return sum(graph.compute_us for graph in plan.graphs)


def _collectives(world: World, ranks: int, known: Hardware, arguments: Any) -> list[Row]:
    """Single collectives of a few sizes on the emulated network."""
    rows = []
    for kind, call in _CALLS.items():
        for size_mb in arguments.megabytes:
            numel = round(size_mb * 1e6 / 4 / ranks)
            one, whole = torch.zeros(numel), torch.zeros(numel * ranks)
            output, source = (whole, one) if kind is Kind.GATHER else (one, whole)
            samples = alternate({"": lambda: call(output, source)}, rounds=arguments.rounds)[""]  # noqa: B023
            sent_bytes = 4 * numel * ranks * share_of_others(ranks)
            predicted = known.collective_us(kind.value, sent_bytes, GroupRanks(ranks))
            rows.append(_row(f"{kind.value}, {size_mb:g} MB", predicted, samples, "us"))
    world.reset()
    return rows


def _row(what: str, predicted_us: float, samples: Samples, unit: str) -> Row:
    if samples.error is not None:
        return {"what": what, **samples.to_dict()}
    return _compared(what, predicted_us, samples.median_s * 1e6, unit)


def _compared(what: str, predicted: float, found: float, unit: str) -> Row:
    return {
        "what": what,
        "predicted": predicted,
        "measured": found,
        "unit": unit,
        "prediction_error": predicted / found - 1,
    }


def _number(value: float) -> str:
    return f"{value:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
