"""The first step on several gloo ranks of one host, with empty caches and with full ones.

Each is that of new processes, from the call of the compiled model to the end of the optimizer's step; starting the
processes and making the model are not counted. What the ranks compile is counted by Inductor itself.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import models
from benchmarks._torch import compiled_graphs
from benchmarks.command import Columns, finish, parser, quiet, table
from benchmarks.models import LlamaSize
from fsdp_compile.parity.processes import run_on_ranks

_TIMEOUT_S = 1800


@dataclasses.dataclass(frozen=True)
class FirstStep:
    """What the ranks do.

    Attributes:
        size: Of the model.
        cache: Inductor's folder.
    """

    size: LlamaSize
    cache: Path


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a first step took on one rank.

    Attributes:
        seconds: Until it was done.
        processor_s: Of the processor, for this process and the compilers that it has started.
        compiled: How many graphs it has compiled, and not loaded.
    """

    seconds: float
    processor_s: float
    compiled: int


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("first_step", "Time of the first step of several ranks of a host, cold and warm.")
    made.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="gloo ranks (default: 1 2 4)"
    )
    made.add_argument("--layers", type=int, default=4, metavar="N", help="blocks of the Llama (default: 4)")
    made.add_argument("--rounds", type=int, default=3, metavar="N", help="starts of each kind (default: 3)")
    arguments = made.parse_args(argv)
    quiet()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same for any number of ranks
    if arguments.smoke:
        arguments.ranks, arguments.layers, arguments.rounds = [2], 1, 1
    size = dataclasses.replace(models.SMOKE, layers=arguments.layers)
    taken: dict[tuple[int, str], list[list[Taken]]] = {}
    for _ in range(arguments.rounds):  # in turn: what disturbs the machine disturbs all of them
        for ranks in arguments.ranks:
            with tempfile.TemporaryDirectory() as folder:
                step = FirstStep(size, Path(folder) / "cache")
                for kind in ("cold", "warm"):
                    taken.setdefault((ranks, kind), []).append(_started(step, ranks))
    rows = [_row(ranks, kind, rounds) for (ranks, kind), rounds in taken.items()]
    for row in rows:
        row["over_one"] = _ratio(row, rows, ranks=1, kind=row["kind"])
        row["over_cold"] = _ratio(row, rows, ranks=row["ranks"], kind="cold")
    columns: Columns = {
        "ranks": str,
        "kind": str,
        "step_s": _s,
        "processor_s": _s,
        "over_one": _times,
        "over_cold": _times,
        "compiled": str,
    }
    table("medians: first step of the slowest rank, processor time of all, graphs that each compiled", rows, columns)
    return finish(arguments, {"layers": arguments.layers, "rounds": arguments.rounds}, rows)


def _started(step: FirstStep, ranks: int) -> list[Taken]:
    found: list[Taken] = run_on_ranks(run_rank, step, ranks, timeout_s=_TIMEOUT_S)
    return found


def run_rank(step: FirstStep) -> list[Taken]:
    """Takes the first step as one rank; what the ranks took, on each of them."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(step.cache)
    torch.set_num_threads(1)
    quiet()
    task = models.llama(step.size)
    model = task.make()
    compiled: Any = torch.compile(model, backend="fsdp", options={"regions": "whole"})
    optimizer = torch.optim.AdamW(model.parameters())
    dist.barrier()
    start_s, processor_s = time.perf_counter(), _processor_s()
    task.loss(task.forward(compiled)).backward()
    optimizer.step()
    mine = Taken(time.perf_counter() - start_s, _processor_s() - processor_s, compiled_graphs())
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _processor_s() -> float:
    """Seconds of this process and of the compilers that it has waited for."""
    return sum(os.times()[:4])


def _row(ranks: int, kind: str, rounds: Sequence[Sequence[Taken]]) -> dict[str, Any]:
    return {
        "ranks": ranks,
        "kind": kind,
        "step_s": statistics.median(max(each.seconds for each in every) for every in rounds),
        "processor_s": statistics.median(sum(each.processor_s for each in every) for every in rounds),
        "compiled": " + ".join(str(each.compiled) for each in rounds[-1]),
    }


def _ratio(row: dict[str, Any], rows: Sequence[dict[str, Any]], *, ranks: int, kind: str) -> float | None:
    of = next((other for other in rows if (other["ranks"], other["kind"]) == (ranks, kind)), None)
    return None if of is None or of is row else row["step_s"] / of["step_s"]


def _s(seconds: float) -> str:
    return f"{seconds:.1f} s"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} x"


if __name__ == "__main__":
    sys.exit(main())
