"""Ends ranks with SIGKILL at random points of saving, again and again, and loads what is left: a program.

    python -m tests.training.killed_saves FOLDER --kills 50 --ranks 2 --seed 0

Ranks are forked from this process, which imports torch once. They save after every step, and write each step that was
saved into a file; then all are killed at one time. New ranks must find that step, or the one after it, bit for bit.
With `--background` a thread saves, while the next step overwrites what is saved.
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
    saves = run.in_background()

    def save(step: int) -> None:
        run.step(step)
        run.save_in_background(step, saves)
        saves.wait()

    _save_again_and_again(run, log, save)


def _save_again_and_again(run: SmallRun, log: Path, save: Callable[[int], None]) -> None:
    step = run.load().step if run.checkpoints.newest() else 0
    while True:
        step += 1
        save(step)
        if run.world.is_first:
            aside = log.with_suffix(".aside")
            aside.write_text(str(step))
            aside.replace(log)


def _load(folder: Path, log: Path) -> None:
    run = SmallRun(folder)
    loaded = run.load()
    saved = int(log.read_text())
    assert loaded.skipped == (), loaded
    assert loaded.step in (saved, saved + 1), (loaded, saved)
    assert run.seen() == {float(loaded.step)}


def _fork(ranks: int, number: int, call: Callable[[Path, Path], None], folder: Path, log: Path) -> list[int]:
    """Process ids of new ranks that call something."""
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            try:
                store = f"file://{folder}.store-{number}"
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
                call(folder, log)
            except BaseException as error:  # noqa: BLE001, RUF100  # this process must not go on as its parent
                print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    return pids


def _kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


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
        pids = _fork(arguments.ranks, 2 * kill, save_for_ever, folder, log)
        while not log.exists() or log.read_text() == before:
            time.sleep(0.005)
        time.sleep(dice.uniform(0, 0.1))  # a few saves: every point of one is as likely
        _kill(pids)
        interrupted += (folder / ".partial").exists() or (folder / ".discarded").exists()
        loads = _fork(arguments.ranks, 2 * kill + 1, _load, folder, log)
        failed = [status for _, status in (os.waitpid(pid, 0) for pid in loads) if status]
        if failed:
            print(f"kill {kill} left {sorted(path.name for path in folder.iterdir())}, {log.read_text()} was saved")
            return 1
    print(f"{arguments.kills} kills, {interrupted} of them while a save was on its way; {log.read_text()} saves")
    return 0


if __name__ == "__main__":
    sys.exit(main())
