"""What plans lose that were made with wrong times, before and after they are refined; all of it is simulated.

A plan is made for a link whose estimated times are wrong by some factor. The step is simulated with the true times, its
calls of communication are measured there as in a run (`refine_after`), and the plan is made once more.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import fsdp_compile
from benchmarks import models
from benchmarks.command import Columns, finish, parser, percent, quiet, table
from fsdp_compile import FSDPOptions
from fsdp_compile.cost.compute import node_costs
from fsdp_compile.cost.fusion import Fusion, plan_kernels
from fsdp_compile.cost.hardware import Hardware, hardware
from fsdp_compile.cost.links import Link, Quantity
from fsdp_compile.cost.timeline import schedule, start_of
from fsdp_compile.ir.graph import KEY, Phase, StepGraph, record_of
from fsdp_compile.layout.spec import UnshardSpec, parse
from fsdp_compile.passes import schedule_auto
from fsdp_compile.passes.planned_times import is_wait
from fsdp_compile.pipeline import transform
from fsdp_compile.planner.measured_times import Mark, Measured, PlannedTimes, Run, gain, link_steps, times_of

LEAST_GAIN = 0.03
"""As in a run, a smaller gain is not worth a compile."""
Times = Mapping[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("refined_plans", "What plans with wrong times lose, before and after they are refined.")
    made.add_argument(
        "--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], metavar="X",
        help="true time on the link over that of computing (default: 0.5 1 2)",
    )  # fmt: skip
    made.add_argument(
        "--errors", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0, 4.0], metavar="X",
        help="estimated times on the link over the true ones (default: 0.25 0.5 1 2 4)",
    )  # fmt: skip
    made.add_argument("--ranks", type=int, default=8, metavar="N", help="ranks (default: 8)")
    arguments = made.parse_args(argv)
    quiet()
    size = models.SMOKE if arguments.smoke else models.TWO_CORES
    rows = run(size, arguments.ranks, arguments.ratios, arguments.errors)
    columns: Columns = {
        "operators": str,
        "ratio": "{:g}".format,
        "estimate": "{:g}".format,
        "before": percent,
        "after": percent,
        "refined": str,
        "found": lambda found: f"{found:.2f}",
    }
    table("time lost against the best plan with exact times", rows, columns)
    return finish(arguments, {"ranks": arguments.ranks}, rows)


def run(size: models.LlamaSize, ranks: int, ratios: Sequence[float], errors: Sequence[float]) -> list[dict[str, Any]]:
    """Plans one model for each true ratio with each error; operators as estimated, and each kind wrong by a factor."""
    task = models.llama(size, device="meta")
    plan = fsdp_compile.explain(task.make(), world_size=ranks, hardware=hardware("cpu", 1.0), **task.inputs[1])
    assert plan.traced is not None
    steps = plan.traced.regions[0].steps
    compute_us = sum(graph.compute_us for graph in plan.graphs)
    link_us = sum(graph.communication_us for graph in plan.graphs)
    rows = []
    for wrong, ratio in itertools.product((False, True), ratios):
        there = hardware("cpu", link_us / (ratio * compute_us))
        truth = _Truth(steps, there, _factors(steps) if wrong else {})
        best_us = truth.best_us()
        for error in errors:
            rows.append({"operators": "wrong" if wrong else "exact", "ratio": ratio, "estimate": error})
            rows[-1] |= truth.lost(error, best_us)
    return rows


def _factors(steps: Sequence[StepGraph]) -> dict[str, float]:
    """By what the times of each kind of operator are multiplied: between a quarter and four, all kinds alike likely."""
    kinds = sorted({str(node.target) for step in steps for node in step.graph.nodes})
    chance = random.Random(0)
    return {kind: 4 ** chance.uniform(-1, 1) for kind in kinds}


@dataclasses.dataclass
class _Truth:
    """A model's graphs before the passes, and the times that they really take."""

    steps: Sequence[StepGraph]
    there: Hardware
    factors: Mapping[str, float]

    def best_us(self) -> float:
        """A step by the best plan that knows all times, whatever margin it takes."""
        found = []
        for margin in (1.0, schedule_auto.MEASURED_MARGIN, schedule_auto.MARGIN):
            with mock.patch.object(schedule_auto, "MARGIN", margin):
                found.append(sum(run.whole.end_us for _, run in self._made(1.0, {}, exact=True)))
        return min(found)

    def lost(self, error: float, best_us: float) -> dict[str, Any]:
        """A plan with times that are wrong by a factor, and what is made of it after it was measured."""
        first = self._made(error, {})
        took_us = sum(run.whole.end_us for _, run in first)
        times = {link: times_of(step) for link, step in link_steps(first).items()}
        is_worth = gain(first, times, schedule_auto.MEASURED_MARGIN) >= LEAST_GAIN
        then_us = sum(run.whole.end_us for _, run in self._made(error, times)) if is_worth else took_us
        return {
            "before": took_us / best_us - 1,
            "after": then_us / best_us - 1,
            "refined": "yes" if is_worth else "no",
            "found": next(iter(times.values())),
        }

    def _made(self, error: float, times: Times, *, exact: bool = False) -> Measured:
        """Plans both graphs with estimates that are wrong, and measures a simulated step with the true times."""
        found = []
        for captured in self.steps:
            step = with_times(captured.copy(), times)
            guessed = _slower(self.there, error)
            if exact:
                guessed = self._true(transform(step.copy(), FSDPOptions(hardware=guessed)), guessed)
            planned: dict[Phase, PlannedTimes] = {}
            step = transform(step, FSDPOptions(hardware=guessed, refine_after=1), planned)
            # Graphs that were refined multiply times on the link by themselves.
            undone = _slower(self.there, 1 / next(iter(times.values()), 1.0))
            found.append((planned[step.phase], _simulated(step, self._true(step, undone))))
        return found

    def _true(self, step: StepGraph, there: Hardware) -> Hardware:
        costs = node_costs(step.graph, there, plan_kernels(step.graph, Fusion.KERNELS))
        known = {node.name: cost.time_us * self.factors.get(str(node.target), 1.0) for node, cost in costs.items()}
        return dataclasses.replace(
            there, device=dataclasses.replace(there.device, estimate=lambda node: known.get(node.name))
        )


def _slower(there: Hardware, times: float) -> Hardware:
    """The same with a link that takes so many times as long."""
    link: Link = there.link
    rate, launch, hop = link.rate.value / times, link.launch.value * times, link.hop.value * times
    changed = dataclasses.replace(
        link, rate=Quantity(rate, "byte/s", ""), launch=Quantity(launch, "us", ""), hop=Quantity(hop, "us", "")
    )
    return dataclasses.replace(there, link=changed)


def with_times(step: StepGraph, times: Times) -> StepGraph:
    """A graph before the passes, whose reads say what was measured, as a second compile has them."""

    def measured(spec: UnshardSpec) -> UnshardSpec:
        return dataclasses.replace(spec, link_times=tuple(times.items()))

    def read(argument: object) -> object:
        return measured(parse(argument)).text if isinstance(argument, str) else argument

    for node in step.graph.nodes if times else ():
        record = record_of(node)
        if record is not None:
            node.meta[KEY] = dataclasses.replace(record, specs=tuple(map(measured, record.specs)))
        elif str(node.target).startswith("fsdp_compile."):
            node.args = tuple(map(read, node.args))
    return step


def _simulated(step: StepGraph, there: Hardware) -> Run:
    """A run of a graph that takes the times of some hardware."""
    timeline = schedule(step, there, plan_kernels(step.graph, Fusion.KERNELS)).timeline
    marks = []
    for node in step.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("_c10d_functional"):
            begin_us = end_us = timeline.reached_us[node]
            if is_wait(node.target):
                end_us = max(begin_us, timeline.transfers[start_of(node)].end_us)
            marks.append(Mark(is_wait(node.target), begin_us, end_us))
    return Run(Mark(waits=False, begin_us=0.0, end_us=timeline.end_us), tuple(marks))


if __name__ == "__main__":
    sys.exit(main())
