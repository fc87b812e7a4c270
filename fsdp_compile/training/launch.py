"""Starts the ranks of a job on this host, or joins those that an elastic launcher started."""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fsdp_compile.comm.failures import end_by, end_quickly, explained
from fsdp_compile.comm.groups import join_world
from fsdp_compile.comm.placement import launcher_folder, restarts
from fsdp_compile.errors import RankFailedError
from fsdp_compile.training.job import Job
from fsdp_compile.training.trainer import train

_SAY_ALL = ("FSDPCompileError", "CheckpointError", "ConfigError", "RankMismatchError", "UnsupportedModelError")
"""Errors of ours whose text says what to do: a traceback would show our own lines."""


def launch(job: Job, max_restarts: int = 0) -> None:
    """Run a job on ranks of this host and wait for its end.

    If a rank fails, all are started again, up to `max_restarts` times, and go on from the last checkpoint.

    Raises:
        RankFailedError: A rank failed.
        SignalException, KeyboardInterrupt: This process got a signal and has ended all ranks.
    """
    # Set before ranks import torch, which reads it once.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // job.ranks)))
    # Semaphores of a rank that is ended are freed by Python's resource tracker, a process that would warn about them.
    quiet = (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, quiet))
    # Torch's launcher logs signals that it forwards and failures that it raises: both are shown here, once.
    logged = logging.root.manager.disable
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="fsdp-compile-") as reports:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=job.ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=reports),
        )
        try:
            elastic_launch(config, _run_rank)(job)
        except ChildFailedError as error:
            end_quickly()
            raise RankFailedError(_root_cause(error, Path(reports))) from None
        finally:
            logging.disable(logged)


def join(job: Job) -> None:
    """Be one of the ranks that an elastic launcher started; it gets the traceback of a failure.

    The job is the same on every rank, except for the folder, which is rank 0's.
    """
    record(_run_rank)(job)


def _run_rank(job: Job) -> None:
    # The kernel then ends a rank at once, also inside a collective, where Python's handler would not run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with join_world(job.device, job.timeout_s) as world:
        try:
            with explained("in training"):
                train(world.gather(replace(job, restart=_restart()))[0], world)
        except Exception as error:
            end_by(error)  # torch's launcher catches it
            raise


def _restart() -> str:
    """Which start of how many this is, and why, where the launcher has started the ranks again; else ""."""
    count, folder = restarts(), launcher_folder()
    report = _first_report(Path(folder) / f"attempt_{count - 1}") if count and folder else None
    why = f" after rank {report[0]} failed: {report[1]['message']}" if report else ""
    return f"{count} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}{why}" if count else ""


def _root_cause(error: ChildFailedError, reports: Path) -> str:
    """Which rank failed first, and how."""
    # Of several ranks that are dead when the launcher looks, a signal that it has not sent is the cause.
    killed = [
        found for found in error.failures.items() if found[1].exitcode < 0 and found[1].exitcode != -signal.SIGTERM
    ]
    rank, failure = killed[0] if killed else error.get_first_failure()
    if failure.exitcode < 0:
        return f"rank {rank} was ended by {failure.signal_name()}, the other ranks with it"
    report = _first_report(max(reports.rglob("attempt_*"), key=lambda path: int(path.name.removeprefix("attempt_"))))
    if report is None:
        return f"rank {rank} ended with exit code {failure.exitcode}, the other ranks with it"
    rank, message = report
    name, _, text = message["message"].partition(": ")
    if name == RankFailedError.__name__:  # which names the rank that failed first
        return f"{text}\n(as rank {rank} found; all ranks were ended)"
    if name in _SAY_ALL:
        return f"rank {rank} has ended all ranks:\n{name}: {text}"
    return f"rank {rank} failed, the other ranks were ended:\n{message['extraInfo']['py_callstack']}"


def _first_report(attempt: Path) -> tuple[int, dict[str, Any]] | None:
    """The rank that failed first, of those of this host that were started together, and torch's report of it."""
    # The launcher names the first rank that it found dead, which may be one that lost its connection to the failed
    # rank. A rank writes its report before it closes its connections, so the oldest report is the cause.
    written = sorted(attempt.rglob("error.json"), key=lambda report: report.stat().st_mtime_ns)
    if not written:
        return None
    return int(written[0].parent.name), json.loads(written[0].read_text())["message"]
