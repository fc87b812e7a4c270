"""Starts one process per rank, and ends them all when one fails."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_compile.errors import ConfigError, FSDPCompileError, RankFailedError, UnsupportedModelError

_GRACE_S = 2.0
"""How long ranks may take, after one has failed, to report that they failed first."""
_USER_ERRORS: dict[str, type[FSDPCompileError]] = {e.__name__: e for e in (ConfigError, UnsupportedModelError)}


@dataclasses.dataclass(frozen=True)
class Place:
    """One rank of a world that meets through a file.

    Attributes:
        store: The file.
        device_type: "cpu" meets through gloo, "cuda" through NCCL.
        timeout_s: For each collective.
    """

    rank: int
    world_size: int
    store: Path
    device_type: str
    timeout_s: float


@dataclasses.dataclass(frozen=True)
class _Failure:
    """The error that ended a rank; of one that is shown to the user alone, its kind and parts."""

    text: str
    kind: str = ""
    parts: tuple[str, str | None, str | None] = ("", None, None)


def run_on_ranks(fn: Callable[[Any], Any], argument: Any, place: Callable[[int, Path], Place], world_size: int) -> Any:
    """Calls `fn(argument)` on every rank of a new world and returns what rank 0 returned.

    Args:
        fn: A function of a module.
        argument: Something that can be pickled.
        place: From rank and rendezvous file to the rank's place.
        world_size: Number of ranks.

    Raises:
        ConfigError: If the argument cannot be sent to another process, or a rank raised it.
        UnsupportedModelError: If a rank raised it.
        RankFailedError: If a rank died or raised anything else, with that rank's traceback.
    """
    call = _pickled((fn, argument))
    # Read by torch when a rank imports it.
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // world_size)))
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="fsdp-compile-") as folder:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                where = place(rank, Path(folder) / "store")
                process = context.Process(target=_serve, args=(theirs, where, call), name=f"rank {rank}", daemon=True)
                processes.append(process)
                connections.append(ours)
                process.start()
                theirs.close()  # so that the end of the process ends the stream
            result = _collect(processes, connections)
            for process in processes:
                process.join(timeout=_GRACE_S)  # their streams said that they are done
            return result
        finally:
            for process in processes:
                _kill(process)
            if threads is None:
                del os.environ["OMP_NUM_THREADS"]


def _pickled(call: Any) -> bytes:
    try:
        return pickle.dumps(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"a function or object cannot be sent to another process: {error}",
            where="check_parity",
            instead="functions that are defined at the top level of a module, or functools.partial of them: no lambdas",
        ) from error


def _collect(processes: Sequence[SpawnProcess], connections: Sequence[Connection]) -> Any:
    waiting = dict(zip(connections, range(len(processes)), strict=True))
    results: dict[int, Any] = {}
    failures: dict[int, _Failure | None] = {}
    deadline_s: float | None = None
    while waiting:
        timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        ready = wait(list(waiting), timeout=timeout_s)
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                outcome = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                outcome = None
            if outcome is None or isinstance(outcome, _Failure):
                failures[rank] = outcome
                deadline_s = deadline_s or time.monotonic() + _GRACE_S
            else:
                (results[rank],) = outcome
    if failures:
        _raise(processes, failures)
    return results[0]


def _raise(processes: Sequence[SpawnProcess], failures: dict[int, _Failure | None]) -> None:
    """Raises the cause of some failures: a death explains the errors of other ranks, else the first error."""
    world = f"of {len(processes)}"
    for rank, failure in failures.items():
        if failure is None:
            raise RankFailedError(
                f"rank {rank} {world} {_death(processes[rank])}; the other ranks were ended",
                instead='if the script that calls this has no `if __name__ == "__main__":`, put the call below one',
            )
    rank, failure = next(iter(failures.items()))
    assert failure is not None
    if failure.kind:
        what, where, instead = failure.parts
        raise _USER_ERRORS[failure.kind](what, where=where, instead=instead)
    raise RankFailedError(f"rank {rank} {world} failed, the other ranks were ended:\n{failure.text}")


def _death(process: SpawnProcess) -> str:
    process.join(timeout=_GRACE_S)  # the stream ends a moment before the process does
    code = process.exitcode
    return f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"


def _kill(process: SpawnProcess) -> None:
    if process.pid is not None:
        process.kill()
        process.join()


def _serve(connection: Connection, place: Place, call: bytes) -> None:
    """Runs one rank from start to end."""
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    try:
        fn, argument = pickle.loads(call)
        _join(place)
        outcome: Any = (fn(argument),)
        dist.barrier()  # no rank leaves while another still needs it
    except tuple(_USER_ERRORS.values()) as error:
        outcome = _Failure(traceback.format_exc(), type(error).__name__, (error.what, error.where, error.instead))
    except AttributeError as error:
        outcome = _Failure(traceback.format_exc(), *_import_trouble(error))
    except BaseException:
        outcome = _Failure(traceback.format_exc())
    connection.send_bytes(pickle.dumps(outcome))
    if isinstance(outcome, _Failure):
        time.sleep(_GRACE_S / 2)  # so that the failures which this one causes are reported after it
        os._exit(1)  # without waiting for threads of collectives that will never end
    dist.destroy_process_group()


def _import_trouble(error: AttributeError) -> tuple[str, tuple[str, str | None, str | None]] | tuple[()]:
    """A function of an interactive session is known to this process by a name that leads nowhere."""
    if not str(error).startswith("Can't get attribute"):
        return ()
    what = f"a function cannot be imported in another process: {error}"
    return "ConfigError", (what, "check_parity", "functions of a module, or of a script that is a file")


def _join(place: Place) -> None:
    if place.device_type == "cuda":
        torch.cuda.set_device(place.rank)
    dist.init_process_group(
        "nccl" if place.device_type == "cuda" else "gloo",
        store=dist.FileStore(str(place.store), place.world_size),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=place.timeout_s),
    )


def _end_with_parent(connection: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        connection.poll(None)
        connection.recv_bytes()
    os._exit(1)
