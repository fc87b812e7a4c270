"""Run a function on several ranks: a pool of processes, started once for all tests of a session.

    def sum_of_ranks() -> float:
        t = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(t)
        return t.item()

    assert run_ranks(sum_of_ranks, world_size=4) == [6.0] * 4

    @on_ranks(world_size=4)
    def test_every_rank_has_the_sum() -> None:
        assert sum_of_ranks() == 6.0

Starting a process that imports torch takes seconds and making a gloo group takes milliseconds, so processes
are kept and every call gets a new default group: no subgroup or half-done collective of one test reaches the
next. Where it can be, they are copies of one process that has imported what preloaded.py names.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from tests.rank_worker import Failure, Outcome, Success, Task, serve

P = ParamSpec("P")
T = TypeVar("T")

MAX_WORLD_SIZE = 4
_GRACE_S = 5.0  # how long the other ranks may take to end after one has failed
# A process that has looked for GPUs cannot be copied.
_IS_COPIED = sys.platform == "linux" and not torch.cuda.is_available()
_PROCESSES: Any = multiprocessing.get_context("forkserver" if _IS_COPIED else "spawn")
_PROCESSES.set_forkserver_preload(["tests.preloaded"])


class RankError(RuntimeError):
    """A rank died, hung, or raised something that could not be sent here."""


def run_ranks(
    fn: Callable[..., T], *args: object, world_size: int = 2, timeout_s: float = 300, **kwargs: object
) -> list[T]:
    """Call `fn(*args, **kwargs)` on every rank of a new default gloo group.

    Each rank starts with Dynamo reset, seed 0, default dtype and device, one thread.

    Args:
        fn: A function of a module: ranks import it by name.
        args: Picklable arguments, the same for every rank.
        world_size: Number of ranks, 1 to 4.
        timeout_s: For the whole call, and for each collective in it.
        kwargs: Picklable keyword arguments, the same for every rank.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: A rank died, or did not end in time, or raised what cannot be pickled.
        Exception: What the first failing rank raised, with that rank's traceback as a note.
    """
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"world_size is {world_size}: the pool runs 1 to {MAX_WORLD_SIZE} ranks")
    call = pickle.dumps((fn, args, kwargs))
    return _POOL.run(call, world_size, timeout_s)


def on_ranks(
    *, world_size: int | Callable[..., int] = 2, timeout_s: float = 300
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Runs a test on every rank of a new group, with the arguments that pytest gives it: they have to be picklable.

    Args:
        world_size: As in `run_ranks`, or what makes it of the arguments.
        timeout_s: As in `run_ranks`.
    """

    def decorate(test: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            if dist.is_initialized():  # called by a rank, which imports the test by its name
                test(*args, **kwargs)
            else:
                ranks = world_size(*args, **kwargs) if callable(world_size) else world_size
                run_ranks(functools.partial(run, *args, **kwargs), world_size=ranks, timeout_s=timeout_s)

        return run

    return decorate


def close_pool() -> None:
    """End every worker. The next `run_ranks` starts new ones."""
    _POOL.close()


@dataclass(frozen=True, slots=True)
class _Worker:
    process: BaseProcess
    pid: int
    connection: Connection
    stacks: Path


class _Pool:
    """Worker i serves rank i of every world of more than i ranks."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder: Path | None = None
        self._calls = 0

    def run(self, call: bytes, world_size: int, timeout_s: float) -> list[Any]:
        try:
            workers = self._at_least(world_size)[:world_size]
            self._send(call, workers, timeout_s)
            outcomes = _collect(workers, timeout_s)
            problem = _problem(workers, outcomes, timeout_s)
        except BaseException:  # Ctrl-C and test timeouts included: ranks would answer the wrong call
            self.kill()
            raise
        if len(outcomes) < world_size:
            self.kill()
        if problem is not None:
            raise problem
        return [outcome.value for _, outcome in sorted(outcomes.items()) if isinstance(outcome, Success)]

    def close(self) -> None:
        """End idle workers the gentle way, so that they can free their semaphores."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(timeout=_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End every worker now, with its children."""
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):  # not yet leader of a group, or gone
                os.killpg(worker.pid, signal.SIGKILL)
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._workers.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _at_least(self, count: int) -> list[_Worker]:
        if not all(worker.process.is_alive() for worker in self._workers):
            self.kill()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fsdp_compile-ranks-"))
        while len(self._workers) < count:
            self._workers.append(_start_worker(len(self._workers), self._folder))
        return self._workers

    def _send(self, call: bytes, workers: list[_Worker], timeout_s: float) -> None:
        assert self._folder is not None
        self._calls += 1
        store = self._folder / f"store-{self._calls}"
        for rank, worker in enumerate(workers):
            task = Task(rank, len(workers), store, timeout_s, call)
            worker.connection.send_bytes(pickle.dumps(task))


def _start_worker(rank: int, folder: Path) -> _Worker:
    ours, theirs = _PROCESSES.Pipe()
    stacks = folder / f"stacks-{rank}"
    process = _PROCESSES.Process(
        target=serve, args=(theirs, stacks, dict(os.environ)), name=f"rank {rank}", daemon=True
    )
    process.start()
    theirs.close()  # so that the end of the process ends the stream
    assert process.pid is not None
    return _Worker(process, process.pid, ours, stacks)


def _collect(workers: list[_Worker], timeout_s: float) -> dict[int, Outcome]:
    """Outcomes by rank in order of arrival; ranks that died or hung are missing."""
    deadline_s = time.monotonic() + timeout_s
    rank_of = {worker.connection: rank for rank, worker in enumerate(workers)}
    outcomes: dict[int, Outcome] = {}
    while rank_of:
        ready = wait(list(rank_of), timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = rank_of.pop(connection)
            with contextlib.suppress(EOFError, ConnectionResetError):
                outcomes[rank] = pickle.loads(connection.recv_bytes())
            if not isinstance(outcomes.get(rank), Success):
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
    return outcomes


def _problem(workers: list[_Worker], outcomes: dict[int, Outcome], timeout_s: float) -> BaseException | None:
    """The error to raise: a death explains other ranks' exceptions, an exception explains their hanging."""
    world = f"of {len(workers)}"
    missing = [rank for rank in range(len(workers)) if rank not in outcomes]
    dead = [rank for rank in missing if _is_dead(workers[rank])]
    if dead:
        return RankError("\n".join(f"rank {rank} {world} died: {_death(workers[rank])}" for rank in dead))
    for rank, outcome in outcomes.items():
        if isinstance(outcome, Failure):
            error = outcome.error or RankError(f"rank {rank} {world} failed:\n{outcome.traceback}")
            error.add_note(f"Raised on rank {rank} {world}:\n{outcome.traceback}")
            return error
    if missing:
        stacks = [f"rank {rank}:\n{_stacks(workers[rank])}" for rank in missing]
        named = ", ".join(map(str, missing))
        return RankError("\n".join([f"rank {named} {world} did not end within {timeout_s:g} s; killed at", *stacks]))
    return None


def _is_dead(worker: _Worker) -> bool:
    worker.process.join(timeout=0.5)  # the stream ends a moment before the process does
    return not worker.process.is_alive()


def _death(worker: _Worker) -> str:
    code = worker.process.exitcode
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _stacks(worker: _Worker) -> str:
    """Where a hanging worker is: it writes the stacks of its threads when it gets the signal."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGUSR1)
    time.sleep(0.5)
    return worker.stacks.read_text() if worker.stacks.exists() else "(still starting)"


_POOL = _Pool()
atexit.register(close_pool)
