"""Pass time against the number of nodes, and estimated step time against the number of ranks; nothing is run."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_compile
from benchmarks import models
from benchmarks.command import Columns, finish, ms, parser, percent, quiet, table
from benchmarks.lower_bound import lower_bound
from benchmarks.pass_time import timed_passes


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("scaling", "Pass time by nodes, and estimated step time of Llama-3-8B by ranks.")
    made.add_argument(
        "--layers", type=int, nargs="+", default=[4, 8, 16, 32, 48], metavar="N", help="blocks (default: 4 8 16 32 48)"
    )
    made.add_argument(
        "--world-sizes", type=int, nargs="+", default=[8, 64, 512, 4096, 8192], metavar="N",
        help="ranks (default: 8 64 512 4096 8192)",
    )  # fmt: skip
    made.add_argument("--gb-per-s", type=float, default=50.0, metavar="X", help="link of each rank (default: 50)")
    made.add_argument("--rounds", type=int, default=3, metavar="N", help="traces of each model (default: 3)")
    arguments = made.parse_args(argv)
    quiet()
    if arguments.smoke:
        arguments.layers, arguments.world_sizes, arguments.rounds = [1, 2], [8, 64], 1
    by_nodes = [passes(layers, arguments.rounds) for layers in arguments.layers]
    by_ranks = step_times(arguments.world_sizes, arguments.gb_per_s, _shape(arguments))
    table("passes", by_nodes, {"layers": str, "nodes": str, "passes_s": ms, "us_per_node": lambda us: f"{us:.1f}"})
    columns: Columns = {
        "ranks": str,
        "step_s": ms,
        "share_of_busy": percent,
        "share_of_bound": percent,
        "replanned_s": ms,
    }
    table(f"estimated step of Llama-3-8B at {arguments.gb_per_s:g} GB/s", by_ranks, columns)
    settings = {"gb_per_s": arguments.gb_per_s, "rounds": arguments.rounds}
    return finish(arguments, settings, [*by_nodes, *by_ranks])


def passes(layers: int, rounds: int) -> dict[str, Any]:
    """Times the passes on forward and backward of a Llama of `layers` blocks; the fastest round counts."""
    task = models.llama(dataclasses.replace(models.SMOKE, layers=layers), device="meta")
    totals = []
    nodes = 0
    for _ in range(rounds):
        torch.compiler.reset()
        with timed_passes() as times:
            fsdp_compile.explain(task.make(), world_size=8, **task.inputs[1])
        totals.append(sum(one.seconds for one in times))
        nodes = sum(one.nodes for one in times)
    return {"layers": layers, "nodes": nodes, "passes_s": min(totals), "us_per_node": min(totals) / nodes * 1e6}


def step_times(world_sizes: Sequence[int], gb_per_s: float, size: models.LlamaSize) -> list[dict[str, Any]]:
    """Estimated steps of one model on any number of ranks, out of one trace."""
    task = models.llama(size, device="meta")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    plan = fsdp_compile.explain(task.make(), world_size=8, options={"mp_policy": policy}, **task.inputs[1])
    rows = []
    for ranks in world_sizes:
        start_s = time.perf_counter()
        at = plan.at(world_size=ranks, gb_per_s=gb_per_s)
        replanned_s, bound_us = time.perf_counter() - start_s, lower_bound(at).time_us
        rows.append(
            {
                "ranks": ranks,
                "step_s": at.step_us / 1e6,
                "busy_s": at.busy_us / 1e6,
                "share_of_busy": at.busy_us / at.step_us,
                "bound_s": bound_us / 1e6,
                "share_of_bound": bound_us / at.step_us,
                "peak_bytes": at.peak_bytes,
                "replanned_s": replanned_s,
            }
        )
    return rows


def _shape(arguments: Any) -> models.LlamaSize:
    return models.SMOKE if arguments.smoke else models.LLAMA_3_8B


if __name__ == "__main__":
    sys.exit(main())
