"""Checkpoints that are whole or not there, whatever happens while one is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard
from fsdp_compile.errors import ConfigError
from fsdp_compile.training.checkpoint import last_checkpoint, load_checkpoint, save_checkpoint, step_of
from fsdp_compile.training.world import World
from tests.ranks import run_ranks


class Crash(Exception):  # noqa: N818 (it stands for a power cut)
    """The process ends here."""


class Training:
    """A sharded layer of uneven rows and its AdamW, whose weights say how many steps were done."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 7)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))

    def step(self, step: int) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(step)

    def save(self, folder: Path, step: int) -> None:
        save_checkpoint(folder, step, self.model, self.optimizer, self.world)

    def seen(self) -> tuple[set[float], set[float]]:
        """The values of all weights, and AdamW's counts of steps."""
        weights = [weight.full_tensor() for weight in self.model.parameters() if isinstance(weight, DTensor)]
        counts = {float(state["step"]) for state in self.optimizer.state.values()}
        return set(torch.cat([weight.flatten() for weight in weights]).tolist()), counts


def _save_twice(folder: Path) -> list[str]:
    training = Training()
    for step in (1, 2):
        training.step(step)
        training.save(folder, step)
    return sorted(path.name for path in folder.iterdir())


def _crash_in_the_second_save(folder: Path, renamed: str) -> list[str]:
    """Save a second time, up to where the file or folder `renamed` would get its final name."""
    training = Training()
    training.step(1)
    training.save(folder, 1)
    training.step(2)
    rename: Callable[[Path, Path], Path] = Path.rename

    def crash(self: Path, target: Path) -> Path:
        if self.name.startswith(renamed):
            raise Crash
        return rename(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        with pytest.raises((Crash, CheckpointException)):
            training.save(folder, 2)
    return sorted(path.name for path in folder.iterdir())


def _load(folder: Path) -> tuple[int, tuple[set[float], set[float]]]:
    training = Training()
    step = load_checkpoint(folder, training.model, training.optimizer)
    return step, training.seen()


def _load_nothing(folder: Path) -> str:
    training = Training()
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(folder, training.model, training.optimizer)
    return str(caught.value)


def test_a_new_checkpoint_takes_the_place_of_the_old(tmp_path: Path) -> None:
    assert run_ranks(_save_twice, tmp_path) == [["step-000002"]] * 2
    assert run_ranks(_load, tmp_path) == [(2, ({2.0}, {2.0}))] * 2


def test_another_number_of_ranks_can_go_on(tmp_path: Path) -> None:
    run_ranks(_save_twice, tmp_path)
    assert run_ranks(_load, tmp_path, world_size=1) == [(2, ({2.0}, {2.0}))]


@pytest.mark.parametrize("renamed", [".metadata", ".partial"])  # torch's last file, then our folder
def test_the_old_checkpoint_stays_until_the_new_one_is_whole(tmp_path: Path, renamed: str) -> None:
    (left,) = run_ranks(_crash_in_the_second_save, tmp_path, renamed, world_size=1)
    assert left == [".partial", "step-000001"]
    assert run_ranks(_load, tmp_path) == [(1, ({1.0}, {1.0}))] * 2
    # What was left over does not get into the next one.
    (tmp_path / ".partial" / "rubbish").write_text("left over")
    assert run_ranks(_save_twice, tmp_path) == [["step-000002"]] * 2
    assert not list(tmp_path.rglob("rubbish"))


def test_old_checkpoints_are_still_there_when_the_new_one_gets_its_name(tmp_path: Path) -> None:
    assert run_ranks(_left_at_rename, tmp_path, world_size=1) == [[[], ["step-000001"]]]


def _left_at_rename(folder: Path) -> list[list[str]]:
    seen: list[list[str]] = []
    rename: Callable[[Path, Path], Path] = Path.rename

    def look(self: Path, target: Path) -> Path:
        if self.name == ".partial":
            assert (self / ".metadata").is_file()  # torch writes it last
            seen.append(sorted(path.name for path in folder.glob("step-*")))
        return rename(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", look)
        _save_twice(folder)
    return seen


def test_the_last_checkpoint_is_that_of_the_most_steps(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "nothing") is None
    for name in ("step-000002", "step-000010", "step-1000000", ".partial"):
        (tmp_path / name).mkdir()
    last = last_checkpoint(tmp_path)
    assert last is not None
    assert step_of(last) == 1_000_000


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (message,) = set(run_ranks(_load_nothing, tmp_path))
    assert message.startswith(f"there is no complete checkpoint in {tmp_path}")
