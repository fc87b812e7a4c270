"""One rank of the pool in ranks.py: a process that runs what it is sent, each time in a new process group."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing.forkserver
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


@dataclass(frozen=True, slots=True)
class Task:
    """What one rank is to run, and the group to run it in."""

    rank: int
    world_size: int
    store: Path
    """Rendezvous file, new for every call."""
    timeout_s: float
    call: bytes
    """Pickled `(fn, args, kwargs)`; unpickled under the same guard that reports errors of `fn`."""


@dataclass(frozen=True, slots=True)
class Success:
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    error: BaseException | None
    """None where the exception cannot be pickled."""
    traceback: str


Outcome = Success | Failure


@dataclass
class _SetAside:
    """How many modules were imported when the heap was last set aside."""

    modules: int = 0


_set_aside = _SetAside()


def serve(connection: Connection, stacks: Path, environment: dict[str, str]) -> None:
    """Run tasks from `connection` until the session closes it or dies.

    Args:
        connection: Brings pickled `Task`s, takes pickled `Outcome`s.
        stacks: File to which the stacks of all threads are written on SIGUSR1.
        environment: Variables of the session as they are now, and not as they were when its first rank started.
    """
    _live_and_die_with_the_session()
    os.environ.clear()
    os.environ.update(environment)
    # Its records of collectives hold the code that called them, and that code what Dynamo compiled for it.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    # Here rather than by the first task, so that what it makes is set aside as well.
    from benchmarks._torch import forget_meshes  # noqa: F401

    set_aside()
    # What our package warns about is an error here too: pytest's own filters end at its process.
    warnings.filterwarnings("error", module="fsdp_compile")
    environment = dict(os.environ)
    with stacks.open("w") as file, contextlib.suppress(EOFError):
        faulthandler.register(signal.SIGUSR1, file=file)
        while True:
            task = pickle.loads(connection.recv_bytes())
            os.environ.clear()
            os.environ.update(environment)
            _serve_one(task, connection)
    _leave_group()


def reset_torch() -> None:
    """Undo what a test may have left behind in this process, Inductor's disk cache excepted."""
    torch.compiler.reset()
    # Compiling a frame measures how long its guards take, with caches flushed: a tenth of what a small model takes.
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    torch.manual_seed(0)
    random.seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(mode=False)
    torch.set_grad_enabled(mode=True)


def set_aside() -> None:
    """Hides what imports left, some 400,000 objects, from searches through the heap: the collector's and ours.

    Between tests, and only when modules were imported since: garbage among what is set aside is never collected, and
    with it process groups. Torch imports half of itself when it compiles for the first time.
    """
    if len(sys.modules) > _set_aside.modules:
        gc.collect()
        gc.freeze()
        _set_aside.modules = len(sys.modules)


def _live_and_die_with_the_session() -> None:
    # In a process group of our own, Ctrl-C reaches the parent alone; killing the group takes compilers along.
    os.setpgid(0, 0)
    parent_pid = os.getppid()  # of the session, or of its server of processes, which ends when nobody has this open
    server: Any = multiprocessing.forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def _serve_one(task: Task, connection: Connection) -> None:
    reset_torch()
    # The last call's group goes only now that every rank has answered: nobody still receives from it.
    _leave_group()
    set_aside()
    torch.set_num_threads(1)
    outcome = _run(task)
    connection.send_bytes(_packed(outcome))
    if isinstance(outcome, Failure):
        # Peers that wait for this rank in a collective fail at once. Their errors come after ours.
        _leave_group()


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # A world that was not complete counts as well, on the ranks that waited for it: the next one must have one name.
    dist.distributed_c10d._world.group_count = 0
    from benchmarks._torch import forget_meshes

    forget_meshes()


def _run(task: Task) -> Outcome:
    try:
        fn, args, kwargs = pickle.loads(task.call)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(task.store), task.world_size),
            rank=task.rank,
            world_size=task.world_size,
            timeout=timedelta(seconds=task.timeout_s),
        )
        return Success(fn(*args, **kwargs))
    except BaseException as error:
        return Failure(error, traceback.format_exc())


def _packed(outcome: Outcome) -> bytes:
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)  # exceptions with arguments of their own pickle well and unpickle badly
    except Exception:
        if isinstance(outcome, Failure):
            return pickle.dumps(Failure(None, outcome.traceback))
        return pickle.dumps(Failure(None, f"the result cannot be sent back\n{traceback.format_exc()}"))
    return data
