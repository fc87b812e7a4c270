"""Time of our compiles, and of the passes in them, beside that of plain `torch.compile`, at 4 and at 48 layers.

Each compile starts with empty caches and is the first step of a fresh model, from Dynamo to the end of backward.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import models
from benchmarks._torch import fresh_cache
from benchmarks.command import Columns, finish, parser, percent, quiet, table
from benchmarks.contenders import FSDP2_COMPILED, OURS, OURS_BLOCKS, UNSHARDED, Contender, Setup
from benchmarks.measure import Samples, recorded, time_once
from benchmarks.models import Task
from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.wire import Link
from benchmarks.pass_time import timed_passes
from benchmarks.steps import Prepared, forget_compiles


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("compile_time", "Time of the passes beside the time of plain torch.compile.")
    made.add_argument("--layers", type=int, nargs="+", default=[4, 48], metavar="N", help="blocks (default: 4 48)")
    made.add_argument("--ranks", type=int, default=8, metavar="N", help="emulated ranks (default: 8)")
    made.add_argument("--rounds", type=int, default=3, metavar="N", help="compiles of each kind (default: 3)")
    arguments = made.parse_args(argv)
    quiet()
    if arguments.smoke:
        arguments.layers, arguments.rounds = [1, 2], 1
    rows = [run(layers, arguments.ranks, arguments.rounds) for layers in arguments.layers]
    columns: Columns = {
        "layers": str,
        "nodes": str,
        "plain_s": _s,
        "fsdp_compile_s": _s,
        "blocks_s": _s,
        "fsdp2_blocks_s": _s,
        "passes_s": _s,
        "passes_share": percent,
    }
    table("cold compile and first step; medians", rows, columns)
    return finish(arguments, {"ranks": arguments.ranks, "rounds": arguments.rounds}, rows)


def run(layers: int, ranks: int, rounds: int) -> dict[str, Any]:
    """Compiles a Llama of `layers` narrow blocks in all ways, in turn."""
    task = models.llama(dataclasses.replace(models.SMOKE, layers=layers))
    plain, ours, by_blocks, blocks, passes = Samples(), Samples(), Samples(), Samples(), Samples()
    nodes = 0
    with emulated_world(ranks, Network(Link(bytes_per_s=1e15))), recorded(ours):
        for _ in range(rounds):
            plain.seconds.append(_cold(UNSHARDED, task))
            with timed_passes() as times:
                ours.seconds.append(_cold(OURS, task))
            by_blocks.seconds.append(_cold(OURS_BLOCKS, task))
            blocks.seconds.append(_cold(FSDP2_COMPILED, task))
            passes.seconds.append(sum(one.seconds for one in times))
            nodes = sum(one.nodes for one in times)
    if ours.error:
        return {"layers": layers, "error": ours.error}
    return {
        "layers": layers,
        "nodes": nodes,
        "plain_s": plain.median_s,
        "fsdp_compile_s": ours.median_s,
        "blocks_s": by_blocks.median_s,
        "fsdp2_blocks_s": blocks.median_s,
        "passes_s": passes.median_s,
        "passes_share": passes.median_s / plain.median_s,
    }


def _cold(contender: Contender, task: Task) -> float:
    forget_compiles()
    model = task.make()
    prepared = Prepared(model, contender.prepare(model, Setup(task.block)), task)
    with fresh_cache():
        return time_once(prepared.step)


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s"


if __name__ == "__main__":
    sys.exit(main())
