"""Ends ranks with SIGKILL at random points of saving, again and again, and loads what is left: a program.

    python -m tests.training.killed_saves FOLDER --kills 50 --ranks 2 --seed 0

Ranks are forked from this process, which imports torch once. They save after every step, and write each step that was
saved into a file; then all are killed at one time. New ranks must find that step, or the one after it, bit for bit.
With `--background` a thread saves, while the next step overwrites what is saved.

A rank that ends before it is killed is a failure, and no rank outlives this process's `main`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tests.training.small_run import SmallRun


def _save_for_ever(folder: Path, log: Path) -> None:
    run = SmallRun(folder)
    _save_again_and_again(run, log, run.step_and_save)


def _save_in_background_for_ever(folder: Path, log: Path) -> None:
    run = SmallRun(folder)
    saves = run.saves()

    def save(step: int) -> None:
        run.step(step)
        run.save_in_background(step, saves)
        saves.wait()

    _save_again_and_again(run, log, save)


def _save_again_and_again(run: SmallRun, log: Path, save: Callable[[int], None]) -> None:
    step = run.load()[0] if run.checkpoints.newest() else 0
    while True:
        step += 1
        save(step)
        if run.world.rank == 0:
            aside = log.with_suffix(".aside")
            aside.write_text(str(step))
            aside.replace(log)


def _load(folder: Path, log: Path) -> None:
    run = SmallRun(folder)
    step, skipped = run.load()
    saved = int(log.read_text())
    assert skipped == []
    assert step in (saved, saved + 1), (step, saved)
    assert run.seen() == {float(step)}


class EarlyEndError(RuntimeError):
    """A rank was not there to be killed."""


class Ranks:
    """Processes that call something, each a rank of one group.

    Attributes:
        living: Process ids of those that were not waited for yet, and their ranks.
    """

    def __init__(self, size: int, number: int, call: Callable[[Path, Path], None], folder: Path, log: Path) -> None:
        store = f"file://{folder}.store-{number}"
        self.living = {_fork(rank, size, store, call, folder, log): rank for rank in range(size)}

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._send(signal.SIGKILL)
        self.statuses()

    def kill(self) -> None:
        """End all at one time; raises where one has ended by itself."""
        self._send(signal.SIGSTOP)  # or else one could see that another is gone, and end by itself
        self._send(signal.SIGKILL)
        for rank, status in self._wait(0):
            if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
                raise EarlyEndError(f"rank {rank} ended by itself: {_how(status)}")

    def check_running(self) -> None:
        """Raise where one has ended."""
        for rank, status in self._wait(os.WNOHANG):
            raise EarlyEndError(f"rank {rank} ended by itself: {_how(status)}")

    def statuses(self) -> list[int]:
        """Wait until all have ended."""
        return [status for _, status in self._wait(0)]

    def _send(self, number: signal.Signals) -> None:
        for pid in self.living:
            os.kill(pid, number)

    def _wait(self, options: int) -> list[tuple[int, int]]:
        """Ranks that have ended, with what `waitpid` says of them."""
        ended = [(pid, status) for pid, status in (os.waitpid(pid, options) for pid in self.living) if pid]
        return [(self.living.pop(pid), status) for pid, status in ended]


def _fork(rank: int, size: int, store: str, call: Callable[[Path, Path], None], folder: Path, log: Path) -> int:
    """The process id of a new rank that calls something."""
    pid = os.fork()
    if pid:
        return pid
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
        call(folder, log)
    except BaseException as error:  # noqa: BLE001, RUF100  # this process must not go on as its parent
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        os._exit(1)
    os._exit(0)


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def main() -> int:
    """Exit status 0 if every load found what was saved."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--background", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dice = random.Random(arguments.seed)
    folder, log = arguments.folder, arguments.folder.with_suffix(".log")
    save_for_ever = _save_in_background_for_ever if arguments.background else _save_for_ever
    interrupted = 0
    for kill in range(arguments.kills):
        before = log.read_text() if log.exists() else ""
        with Ranks(arguments.ranks, 2 * kill, save_for_ever, folder, log) as ranks:
            while not log.exists() or log.read_text() == before:
                ranks.check_running()
                time.sleep(0.005)
            time.sleep(dice.uniform(0, 0.1))  # a few saves: every point of one is as likely
            ranks.kill()
        interrupted += any(folder.glob(".partial")) or any(folder.glob(".discarded-*"))
        with Ranks(arguments.ranks, 2 * kill + 1, _load, folder, log) as ranks:
            failed = any(ranks.statuses())
        if failed:
            print(f"kill {kill} left {sorted(path.name for path in folder.iterdir())}, {log.read_text()} was saved")
            return 1
    print(f"{arguments.kills} kills, {interrupted} of them while a save was on its way; {log.read_text()} saves")
    return 0


if __name__ == "__main__":
    sys.exit(main())
