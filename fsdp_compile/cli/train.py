"""`fsdp-compile train`: arguments of a training run, and its exit status."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from dataclasses import fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, get_type_hints

from fsdp_compile.cli.arguments import add_backend
from fsdp_compile.comm.placement import TIMEOUT_S, DeviceKind, Placement, launcher_folder, restarts
from fsdp_compile.errors import ConfigError, RankFailedError
from fsdp_compile.training.checkpoint_folder import step_of
from fsdp_compile.training.config import TrainConfig, flag
from fsdp_compile.training.job import Job, new_job, resumed_job

NAME = "train"
ABOUT = "Train a small language model on real text over several processes, each holding its share of it."

_NEWEST = "the newest run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One argument for each field of `TrainConfig`, and those that say where and on what to run."""
    parser.usage = f"{parser.prog} [options]"
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--ranks",
        type=int,
        help="processes to start on this host (default: one per GPU, or 2; below torchrun: those it started)",
    )
    add_backend(run)
    run.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="how long ranks wait for one that is stopped, stuck or cut off before all end (default: %(default)g)",
    )
    run.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often all ranks are started again when one fails, to go on from the last checkpoint (default: 0)",
    )
    run.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the run (default: runs/<time>)")
    run.add_argument(
        "--resume",
        nargs="?",
        const=_NEWEST,
        metavar="FOLDER",
        help="go on from a run's last checkpoint (default: the newest run below runs/)",
    )
    options = parser.add_argument_group("what is trained")
    types = get_type_hints(TrainConfig)
    for field in fields(TrainConfig):
        _add_option(options, field.name, types[field.name], field.default, field.metadata["about"])


def run(arguments: argparse.Namespace) -> int:
    """Train; returns 0 when done, 1 when a rank failed, 128 + n when signal n ended it.

    Raises:
        ConfigError: An option has an impossible value.
    """
    placement = Placement.find(arguments.ranks)
    _check_start(arguments.max_restarts, arguments.timeout, placement)
    job = _job(arguments, placement)
    from torch.distributed.elastic.multiprocessing import SignalException

    from fsdp_compile.training.launch import join, launch

    if placement.started_here is not None:
        join(job)
        return 0
    try:
        launch(job, arguments.max_restarts)
    except (KeyboardInterrupt, SignalException) as interrupted:  # the former before torch's launcher hears signals
        from rich.console import Console

        Console().show_cursor()  # a rank that is killed cannot end its progress bar
        print(f"\ninterrupted; {_how_to_go_on(job)}", file=sys.stderr)
        return 128 + getattr(interrupted, "sigval", signal.SIGINT)
    except RankFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _check_start(count: int, timeout_s: float, placement: Placement) -> None:
    shortest_s, longest_s = 1e-3, 1e8  # torch counts milliseconds, and its clocks overflow at some hundred years
    if not shortest_s <= timeout_s <= longest_s:  # also not for NaN
        instead = f"seconds, a number from {shortest_s:g} to {longest_s:g}"
        raise ConfigError(f"{timeout_s:g} is out of bounds", where="--timeout", instead=instead)
    if count < 0:
        raise ConfigError(f"there cannot be {count} restarts", where="--max-restarts", instead="0 or more")
    if count and placement.started_here is not None:
        raise ConfigError(
            "this process was started by a launcher, which restarts it",
            where="--max-restarts",
            instead="torchrun --max-restarts N, and fsdp-compile train --out FOLDER",
        )


def _add_option(group: argparse._ArgumentGroup, name: str, kind: Any, default: Any, about: str) -> None:
    """Declare an argument that is in the namespace only when given: a resumed run must know what changes."""
    shown = "" if default is None else f" (default: {default})"
    settings: dict[str, Any] = {"help": (about + shown).replace("%", "%%")}
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        # Converted later: argparse names the choices only for text that is none of them.
        settings |= {"choices": [member.value for member in kind]}
    elif kind is bool:
        # Both words: a resumed run may change its mind.
        settings |= {"action": argparse.BooleanOptionalAction}
    elif kind in (int, float):
        settings |= {"type": kind, "metavar": "N" if kind is int else "X"}
    else:
        settings |= {"metavar": "PATH"}
    group.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, **settings)


def _job(arguments: argparse.Namespace, placement: Placement) -> Job:
    given = vars(arguments)
    options = {field.name: given[field.name] for field in fields(TrainConfig) if field.name in given}
    device = DeviceKind(arguments.device)
    if arguments.resume is None:
        restarted_by = launcher_folder() if restarts() else ""
        return replace(new_job(options, arguments.out, placement, device, restarted_by), timeout_s=arguments.timeout)
    if arguments.out is not None:
        raise ConfigError("a resumed run stays in its folder", where="--out", instead="--resume FOLDER, without --out")
    folder = None if arguments.resume is _NEWEST else Path(arguments.resume)
    return replace(resumed_job(options, folder, placement, device), timeout_s=arguments.timeout)


def _how_to_go_on(job: Job) -> str:
    checkpoint = job.checkpoints.newest()
    if checkpoint is None:
        return "there is no checkpoint yet, start again"
    if step_of(checkpoint) == job.run.options.steps:
        return f"all steps were done, see {job.folder}"
    return f"go on with: fsdp-compile train --resume {shlex.quote(str(job.folder))}"
