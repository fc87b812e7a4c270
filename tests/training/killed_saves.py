"""Ends ranks with SIGKILL at random points of saving, again and again, and loads what is left: a program.

    python -m tests.training.killed_saves FOLDER --kills 50 --ranks 2 --seed 0

Ranks are forked from this process, which imports torch once. They save after every step, and write each step that was
saved into a file; then all are killed at one time. New ranks must find that step, or the one after it, bit for bit.
With `--background` a thread saves, while the next step overwrites what is saved.

A rank that ends before it is killed is a failure, and no rank outlives this process's `main`.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
import torch.distributed as dist

from tests.training.small_run import SmallRun


def _save_for_ever(folder: Path, log: Path, *, in_background: bool) -> None:
    run = SmallRun(folder)
    saves = run.saves(in_background=in_background)
    step = run.load()[0] if run.checkpoints.newest() else 0
    while True:
        step += 1
        run.step(step)
        run.save_and_overwrite(step, saves)
        saves.wait()
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


def _serve(rank: int, size: int, store: str, call: Callable[[], None]) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    call()


@contextmanager
def _ranks(size: int, store: Path, call: Callable[[], None]) -> Iterator[list[ForkProcess]]:
    """Processes that call something, each a rank of one group; they end with the block."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_serve, args=(rank, size, f"file://{store}", call)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _check_ends(ranks: list[ForkProcess], expected: int | None) -> None:
    for number, rank in enumerate(ranks):
        if rank.exitcode != expected:
            raise RuntimeError(f"rank {number} ended by itself: exit code {rank.exitcode}")


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
    save = functools.partial(_save_for_ever, folder, log, in_background=arguments.background)
    load = functools.partial(_load, folder, log)
    interrupted = 0
    for kill in range(arguments.kills):
        before = log.read_text() if log.exists() else ""
        with _ranks(arguments.ranks, Path(f"{folder}.store-{2 * kill}"), save) as ranks:
            while not log.exists() or log.read_text() == before:
                _check_ends(ranks, None)
                time.sleep(0.005)
            time.sleep(dice.uniform(0, 0.1))  # a few saves: every point of one is as likely
            for number in (signal.SIGSTOP, signal.SIGKILL):  # one could see that another is gone, and end by itself
                for rank in ranks:
                    assert rank.pid is not None
                    os.kill(rank.pid, number)
            for rank in ranks:
                rank.join()
            _check_ends(ranks, -signal.SIGKILL)
        interrupted += any(folder.glob(".partial")) or any(folder.glob(".discarded-*"))
        with _ranks(arguments.ranks, Path(f"{folder}.store-{2 * kill + 1}"), load) as ranks:
            for rank in ranks:
                rank.join()
            failed = any(rank.exitcode for rank in ranks)
        if failed:
            print(f"kill {kill} left {sorted(path.name for path in folder.iterdir())}, {log.read_text()} was saved")
            return 1
    print(f"{arguments.kills} kills, {interrupted} of them while a save was on its way; {log.read_text()} saves")
    return 0


if __name__ == "__main__":
    sys.exit(main())
