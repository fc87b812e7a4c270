"""A run that is small enough to be saved a thousand times: a sharded layer and its AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard
from fsdp_compile.comm.groups import World
from fsdp_compile.training.checkpoint import Saves, load_checkpoint
from fsdp_compile.training.checkpoint_folder import CheckpointFolder

RUN = "this run"


class SmallRun:
    """A layer of uneven rows, whose weights say how many steps were done."""

    def __init__(self, folder: Path, run: str = RUN) -> None:
        self.model = nn.Linear(4, 7)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
        self.checkpoints = CheckpointFolder(folder, run)

    def step(self, step: int) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for state in self.optimizer.state.values():
            state["step"].fill_(step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(step)

    def save(self, step: int, *, keep: int = 2, in_background: bool = False) -> tuple[str, ...]:
        saves = self.saves(keep=keep, in_background=in_background)
        return saves.save(step, self.model, self.optimizer) + saves.wait()

    def step_and_save(self, *steps: int, keep: int = 2) -> None:
        for step in steps:
            self.step(step)
            self.save(step, keep=keep)

    def saves(self, *, keep: int = 2, in_background: bool = True) -> Saves:
        return Saves(self.checkpoints, self.world, keep=keep, in_background=in_background)

    def spoil(self) -> None:
        weight = self.model.weight
        assert isinstance(weight, DTensor)
        if self.world.rank == 1:
            weight.to_local().data[-1, -1] = float("nan")

    def save_and_overwrite(self, step: int, saves: Saves) -> None:
        """Save, or begin to, and overwrite what is saved, as the next step of training does."""
        saves.save(step, self.model, self.optimizer)
        self.overwrite()

    @torch.no_grad()
    def overwrite(self) -> None:
        """Give all weights and all state another value, in place."""
        for state in self.optimizer.state.values():
            for value in state.values():
                value.fill_(99)
        for parameter in self.model.parameters():
            parameter.fill_(99)

    def load(self) -> tuple[int, list[str]]:
        return load_checkpoint(self.checkpoints, self.model, self.optimizer, self.world)

    def seen(self) -> set[float]:
        """The values of all weights, and AdamW's counts of steps."""
        weights = [weight.full_tensor() for weight in self.model.parameters() if isinstance(weight, DTensor)]
        counts = {float(state["step"]) for state in self.optimizer.state.values()}
        return set(torch.cat([weight.flatten() for weight in weights]).tolist()) | counts


def names(folder: Path) -> list[str]:
    """Of the files and folders in a folder."""
    return sorted(path.name for path in folder.iterdir())


def load(folder: Path) -> tuple[int, set[float], list[str]]:
    """Steps of the checkpoint that a rank loads, the values that it has then, and why others were not loaded."""
    run = SmallRun(folder)
    step, skipped = run.load()
    return step, run.seen(), skipped


@contextmanager
def full_disk(file: str) -> Iterator[None]:
    """Whatever this process writes to a file of that name in an unfinished checkpoint finds no space."""
    mkdir: Callable[..., None] = Path.mkdir

    def fill(self: Path, **options: bool) -> None:
        mkdir(self, **options)
        if self.name == ".partial":
            (self / file).symlink_to("/dev/full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", fill)
        yield
