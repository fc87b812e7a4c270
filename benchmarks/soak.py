"""Memory, descriptors, threads, graphs, groups and lock files over models and worlds that are made and dropped.

Each round makes a world, some models that train, evaluate and accumulate on inputs of changing shapes, drops the models
and destroys the world. Then everything is counted: after the first rounds, in which caches fill, it must be flat. What
torch keeps of dropped models and worlds is given up as [limits](../docs/limits.md) says: `torch.compiler.reset()`, no
flight recorder, DTensor's caches cleared.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from benchmarks._torch import cache_folder, forget_meshes
from benchmarks.command import finish, parser, quiet, table
from fsdp_compile import fully_shard, no_sync
from fsdp_compile.comm.groups import aliases, made_groups
from fsdp_compile.parity.processes import run_on_ranks

_TIMEOUT_S = 300
_WARM_UP = 2
"""Rounds in which caches fill."""
_GROWTH = 0.02
"""What memory may grow by from the end of the warm-up to the last round, as a share: allocators and caches of torch."""
_BATCHES, _WIDTHS = (2, 3, 5, 8), (16, 24, 32)
COUNTS = ("descriptors", "threads", "graph_modules", "meshes", "known_groups", "lock_files")
"""What must be the same after each round but the first ones."""


@dataclasses.dataclass(frozen=True)
class Soak:
    """What is run.

    Attributes:
        rounds: Worlds, one after the other.
        models: In each world.
        steps: Of each model.
        lower: As in `FSDPOptions`.
        folder: Where the ranks of later worlds meet.
    """

    ranks: int
    rounds: int
    models: int
    steps: int
    lower: str
    folder: str


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all rounds, prints and writes what was counted after each; 1 if something has grown."""
    arguments = _parser().parse_args(argv)
    # Torch reads it when a rank imports it. Its records hold compiled code.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    with tempfile.TemporaryDirectory(prefix="fsdp-compile-soak-") as folder:
        soak = _soak_of(arguments, folder)
        rounds: list[dict[str, Any]] = run_on_ranks(_run, soak, soak.ranks, timeout_s=_TIMEOUT_S)
    settings = {name: value for name, value in dataclasses.asdict(soak).items() if name != "folder"}
    total = soak.rounds * soak.models
    table(
        f"{total * soak.steps} steps, {total} models, {soak.rounds} worlds of {soak.ranks} ranks: the most of any rank",
        [row for number, row in enumerate(rounds) if number < _WARM_UP + 1 or number % (len(rounds) // 10 + 1) == 0]
        + rounds[-1:],
        dict.fromkeys(("round", "memory_mb", *COUNTS, "time_s"), str),
    )
    status = finish(arguments, settings, rounds)
    problems = grown(rounds)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else status


def grown(rounds: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence for each thing that the rounds after the warm-up have more and more of."""
    settled = rounds[_WARM_UP:]
    if len(settled) < 2:
        return []
    problems = [
        f"{name} went from {settled[0][name]} to {settled[-1][name]}"
        for name in COUNTS
        if settled[-1][name] > settled[0][name]
    ]
    third = max(1, len(settled) // 3)
    before, after = (
        statistics.median(row["memory_mb"] for row in part) for part in (settled[:third], settled[-third:])
    )
    if after > before * (1 + _GROWTH):
        problems.append(f"memory went from {before:.1f} to {after:.1f} MB")
    return problems


def _parser() -> argparse.ArgumentParser:
    made = parser("soak", (__doc__ or "").splitlines()[0])
    made.add_argument("--ranks", type=int, default=4, metavar="N", help="of each world (default: 4)")
    made.add_argument("--rounds", type=int, default=25, metavar="N", help="worlds that are made (default: 25)")
    made.add_argument("--models", type=int, default=4, metavar="N", help="models in each world (default: 4)")
    made.add_argument("--steps", type=int, default=50, metavar="N", help="steps of each model (default: 50)")
    made.add_argument("--lower", choices=["inductor", "eager"], default="eager", help="default: eager")
    return made


def _soak_of(arguments: argparse.Namespace, folder: str) -> Soak:
    if arguments.smoke:
        return Soak(2, 4, 2, 6, "eager", folder)
    return Soak(arguments.ranks, arguments.rounds, arguments.models, arguments.steps, arguments.lower, folder)


class _Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)


def _run(soak: Soak) -> list[dict[str, Any]]:
    """The rounds on one rank; what was counted after each, of the rank that has most."""
    quiet()
    torch.set_num_threads(1)
    rank = dist.get_rank()
    counted = []
    for number in range(soak.rounds):
        start_s = time.perf_counter()
        for model in range(soak.models):
            _train(soak, number * soak.models + model)
        _leave_world()
        mine = _counted()
        _join_world(soak, number, rank)
        counted.append(_largest(number, mine, time.perf_counter() - start_s))
    return counted


def _train(soak: Soak, number: int) -> None:
    torch.manual_seed(number)
    model = _Model(_WIDTHS[number % len(_WIDTHS)])
    if number % 2:  # the other ones are sharded by their first call
        fully_shard(model, reshard_after_forward=number % 4 == 1)
    compiled: Any = torch.compile(model, backend="fsdp", options={"lower": soak.lower})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(soak.steps):
        parts = 2 if step % 3 == 1 else 1  # each second one of these waits for the next
        for part in range(parts):
            tokens = torch.randint(64, (_BATCHES[step % len(_BATCHES)], 6))
            waits = step > 0 and part + 1 < parts
            with no_sync(model) if waits else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            model.eval()
            with torch.no_grad():
                compiled(tokens)
            model.train()


def _leave_world() -> None:
    dist.barrier()
    dist.destroy_process_group()
    torch.compiler.reset()
    forget_meshes()
    gc.collect()


def _join_world(soak: Soak, number: int, rank: int) -> None:
    store = dist.FileStore(f"{soak.folder}/{number}", soak.ranks)
    timeout = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=soak.ranks, timeout=timeout)


def _counted() -> dict[str, float]:
    alive = gc.get_objects()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "descriptors": _entries("/proc/self/fd"),
        "threads": _entries("/proc/self/task"),
        "graph_modules": sum(fx.GraphModule in type(each).__mro__ for each in alive),
        "meshes": sum(type(each) is dist.DeviceMesh for each in alive),
        "known_groups": len(aliases) + len(made_groups),
        "lock_files": sum(1 for _ in cache_folder().rglob("*.lock")),
    }


def _entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def _largest(number: int, mine: dict[str, float], time_s: float) -> dict[str, Any]:
    every: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    largest = {name: max(each[name] for each in every) for name in mine}
    return {"round": number, **largest, "memory_mb": round(largest["memory_mb"], 1), "time_s": round(time_s, 1)}


if __name__ == "__main__":
    sys.exit(main())
