"""Time of our compiles, and of the passes in them, beside that of plain `torch.compile`, at 4, 48 and 126 layers.

Each compile starts with empty caches and is the first step of a fresh model, from Dynamo to the end of backward; by
blocks there is a second one, warm, with what the first has left in Inductor's folder. Blocks are as wide as in
`step_time`: narrower ones have messages so small that parameters are copied out of them by kernels, which take time to
compile. Batches are small, so that little is computed.
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
    made.add_argument(
        "--layers", type=int, nargs="+", default=[4, 48, 126], metavar="N", help="blocks (default: 4 48 126)"
    )
    made.add_argument("--whole", type=int, default=48, metavar="N", help="most blocks in one graph (default: 48)")
    made.add_argument("--ranks", type=int, default=8, metavar="N", help="emulated ranks (default: 8)")
    made.add_argument("--rounds", type=int, default=3, metavar="N", help="compiles of each kind (default: 3)")
    arguments = made.parse_args(argv)
    quiet()
    if arguments.smoke:
        arguments.layers, arguments.rounds = [1, 2], 1
    size = models.SMOKE if arguments.smoke else dataclasses.replace(models.TWO_CORES, batch=1, tokens=16)
    rows = []
    for layers in arguments.layers:
        task = models.llama(dataclasses.replace(size, layers=layers))
        rows.append({"layers": layers, **run(task, arguments.ranks, arguments.rounds, whole=layers <= arguments.whole)})
    columns: Columns = {
        "layers": str,
        "nodes": str,
        "plain_s": _s,
        "fsdp_compile_s": _s,
        "blocks_s": _s,
        "fsdp2_blocks_s": _s,
        "blocks_warm_s": _s,
        "fsdp2_blocks_warm_s": _s,
        "passes_s": _s,
        "passes_share": percent,
    }
    table("cold compile and first step; medians", rows, columns)
    return finish(arguments, {"ranks": arguments.ranks, "rounds": arguments.rounds}, rows)


def run(task: Task, ranks: int, rounds: int, *, whole: bool) -> dict[str, Any]:
    """Compiles a model in all ways, in turn; in one graph only if it is to be compiled `whole`, too."""
    by_blocks = {"blocks": OURS_BLOCKS, "fsdp2_blocks": FSDP2_COMPILED}
    names = [f"{name}_{start}" for name in by_blocks for start in ("s", "warm_s")]
    samples = {name: Samples() for name in [*names, *(["plain_s", "fsdp_compile_s", "passes_s"] if whole else [])]}
    nodes = None
    with emulated_world(ranks, Network(Link(bytes_per_s=1e15))), recorded(samples["blocks_s"]):
        for _ in range(rounds):
            for name, contender in by_blocks.items():
                with fresh_cache():
                    for start in ("s", "warm_s"):
                        samples[f"{name}_{start}"].seconds.append(_first_step(contender, task))
            if whole:
                with fresh_cache():
                    samples["plain_s"].seconds.append(_first_step(UNSHARDED, task))
                with fresh_cache(), timed_passes() as times:
                    samples["fsdp_compile_s"].seconds.append(_first_step(OURS, task))
                samples["passes_s"].seconds.append(sum(one.seconds for one in times))
                nodes = sum(one.nodes for one in times)
    if samples["blocks_s"].error:
        return {"error": samples["blocks_s"].error}
    found: dict[str, Any] = {name: each.median_s for name, each in samples.items()}
    return {"nodes": nodes, **found, **({"passes_share": found["passes_s"] / found["plain_s"]} if whole else {})}


def _first_step(contender: Contender, task: Task) -> float:
    forget_compiles()
    model = task.make()
    return time_once(Prepared(model, contender.prepare(model, Setup(task.block)), task).step)


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s"


if __name__ == "__main__":
    sys.exit(main())
