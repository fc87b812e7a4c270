"""Saving model and AdamW on gloo ranks: how long training stands still, and how long until a checkpoint is complete.

`fsdp_compile`'s saves are those of `fsdp-compile train`: verified, atomic, and checked for values that are not finite.
torch's are `dcp.save` and `dcp.async_save` of the same state, as they are by default.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import fsdp_compile
from benchmarks import models
from benchmarks.command import Columns, finish, mib, ms, parser, quiet, table
from benchmarks.models import LlamaSize
from fsdp_compile.comm.groups import World
from fsdp_compile.parity.processes import run_on_ranks
from fsdp_compile.training.checkpoint import Saves
from fsdp_compile.training.checkpoint_folder import CheckpointFolder

_SIZE = LlamaSize(layers=6, width=512, hidden=1408, heads=8, key_heads=8, vocabulary=8192, batch=1, tokens=16)
_TIMEOUT_S = 550

Save = Callable[[int], Callable[[], object]]
"""Begins the save of a number, and returns what waits for its end."""


@dataclasses.dataclass(frozen=True)
class Saving:
    """What is saved.

    Attributes:
        size: Of the model.
        folder: Where.
        rounds: How often by each contender, once more to begin with.
    """

    size: LlamaSize
    folder: Path
    rounds: int


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("checkpoints", "Time of a save of model and AdamW, beside torch's dcp.save and dcp.async_save.")
    made.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="gloo ranks (default: 2 4)")
    made.add_argument("--rounds", type=int, default=5, metavar="N", help="saves of each contender (default: 5)")
    made.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="on the disk to be measured (default: a temporary one)"
    )
    arguments = made.parse_args(argv)
    quiet()
    if arguments.smoke:
        arguments.ranks, arguments.rounds = [2], 1
    rows: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            saving = Saving(models.SMOKE if arguments.smoke else _SIZE, Path(folder), arguments.rounds)
            rows += run_on_ranks(run_rank, saving, ranks, timeout_s=_TIMEOUT_S)
    columns: Columns = {"ranks": str, "contender": str, "state_bytes": mib, "stands_still_s": ms, "complete_s": ms}
    table("medians of the slowest rank", rows, columns)
    return finish(arguments, {"rounds": arguments.rounds}, rows)


def run_rank(saving: Saving) -> list[dict[str, Any]]:
    """Measures as one rank; all ranks take the same turns."""
    torch.set_num_threads(1)
    quiet()
    model, optimizer = _trained(saving.size)
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    contenders = _contenders(saving.folder, model, optimizer, world)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(saving.rounds + 1):
        for name, save in contenders.items():
            taken = _timed(save, number, world)
            if number:  # the first one makes buffers and groups
                times[name].append(taken)
    state_bytes = sum(3 * p.numel() * p.element_size() for p in model.parameters())
    return [
        {
            "ranks": world.size,
            "contender": name,
            "state_bytes": state_bytes,
            "stands_still_s": statistics.median(still for still, _ in each),
            "complete_s": statistics.median(complete for _, complete in each),
        }
        for name, each in times.items()
    ]


def _timed(save: Save, number: int, world: World) -> tuple[float, float]:
    """Seconds that training stands still, and until the checkpoint is complete: those of the slowest rank."""
    dist.barrier()
    start_s = time.perf_counter()
    wait = save(number)
    still_s = time.perf_counter() - start_s
    wait()
    complete_s = time.perf_counter() - start_s
    every = world.gather((still_s, complete_s))
    return max(still for still, _ in every), max(complete for _, complete in every)


def _contenders(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> dict[str, Save]:
    def state() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    def torchs(_number: int) -> Callable[[], object]:
        dcp.save(state(), checkpoint_id=folder / "torch")
        return lambda: None

    def torchs_async(_number: int) -> Callable[[], object]:
        future: Any = dcp.async_save(state(), checkpoint_id=folder / "torch, async")
        return future.result

    def ours(name: str, *, in_background: bool) -> Save:
        saves = Saves(CheckpointFolder(folder / name, "benchmark"), world, keep=1, in_background=in_background)

        def save(number: int) -> Callable[[], object]:
            saves.save(number, model, optimizer)
            return saves.wait

        return save

    return {
        "dcp.save": torchs,
        "fsdp_compile": ours("own", in_background=False),
        "dcp.async_save": torchs_async,
        "fsdp_compile --async-checkpoints": ours("own, async", in_background=True),
    }


def _trained(size: LlamaSize) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded Llama and an AdamW that has stepped."""
    model = models.llama(size).make()
    fsdp_compile.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


if __name__ == "__main__":
    sys.exit(main())
