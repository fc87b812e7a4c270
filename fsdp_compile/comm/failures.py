"""How a rank that fails tells the others why, and how these find out who has failed where nobody could tell them.

A rank that ends by an error that nothing catches leaves it in the store of the world. Ranks that wait for others
through the store look there all the while. One that waits in a collective cannot: once that has failed, or has taken
longer than the user's timeout, it looks for the error, and if there is none, asks which ranks still answer.

Torch's store over TCP notices at once that the process which holds it has ended. Where a link is cut nothing arrives,
and its operations wait, whatever their timeout, until TCP gives the connection up: about a quarter of an hour. So the
ranks look there through a store whose operations end in time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import re
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch.distributed as dist

from fsdp_compile._torch.distributed import default_store, other_client
from fsdp_compile.errors import FSDPCompileError, RankFailedError

T = TypeVar("T")
_FIRST_PAUSE_S: Final = 1e-3
_LEAST_LONGEST_PAUSE_S: Final = 0.1
_LOOKS_PER_S: Final = 2000
"""At how many looks per second, of all ranks together, the process that holds the store still has time for other work:
a look is up to four requests, and a request takes it about 28 us (`python -m benchmarks.agreement`)."""
_FAILED = "fsdp_compile/failed"
_ANSWERS = "fsdp_compile/answers"
_ANSWER_S = 2.0
"""How long the other ranks have to answer: they find out at about the same time."""
_TELL_S = 1.0
"""How long a rank that ends by an error tries to tell it."""
_PAUSE_S = 0.05
_READ_S = 0.5
"""How long a rank that holds the store goes on for others to read why it ends: more than the pauses between looks."""
_COMPARED = 64
"""How many ranks' doings are read: each rank of a large world asks the one store."""
_OF_COMMUNICATION = re.compile(r"gloo/|Connection (closed|reset|refused)|Timed out waiting|NCCL error|Broken pipe")
"""What errors of collectives say; torch gives those of gloo no type of their own."""


class AnsweringStore:
    """A store whose methods raise `RuntimeError` if it fails, or does not answer within some seconds."""

    def __init__(self, store: dist.Store, seconds: float) -> None:
        self._store = store
        self._seconds = seconds

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the store."""
        return functools.partial(self._ask, getattr(self._store, name))

    def missing(self, keys: list[str]) -> list[str]:
        """Those keys that are not there: halves what is not all there, so that few of many take few requests."""
        if not keys or self.check(keys):
            return []
        if len(keys) == 1:
            return keys
        middle = len(keys) // 2
        return [*self.missing(keys[:middle]), *self.missing(keys[middle:])]

    def _ask(self, method: Callable[..., T], *arguments: Any) -> T:
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(method(*arguments))
            except BaseException as error:
                answer.set_exception(error)

        # A daemon: a process that ends does not wait for an operation that never does.
        threading.Thread(target=run, name="fsdp_compile store", daemon=True).start()
        try:
            return answer.result(self._seconds)
        except TimeoutError:
            raise RuntimeError(f"no answer within {self._seconds:g} s") from None


def pauses(ranks: int) -> Iterator[float]:
    """Seconds between the looks of one of some ranks that wait for the same: short at first, then as many allow."""
    pause_s, longest_s = _FIRST_PAUSE_S, max(_LEAST_LONGEST_PAUSE_S, ranks / _LOOKS_PER_S)
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)


class _World(NamedTuple):
    """How this rank reaches the others."""

    store: dist.Store
    rank: int


class _LastWorld:
    """The world that this process was in last, for errors that come up when a `finally` has destroyed it."""

    def __init__(self) -> None:
        self.group: weakref.ref[dist.ProcessGroup] | None = None
        self.left: _World | None = None


_last = _LastWorld()


def remember_world() -> None:
    """Makes errors of this rank known to the others also where the world is destroyed before they come up."""
    group = dist.group.WORLD
    assert group is not None
    if _last.group is None or _last.group() is not group:
        client = other_client(default_store())
        _last.group, _last.left = weakref.ref(group), _World(client, dist.get_rank()) if client is not None else None


def _world() -> _World | None:
    return _World(default_store(), dist.get_rank()) if dist.is_initialized() else _last.left


@functools.cache
def tell_of_uncaught_errors() -> None:
    """Makes this process, if it ends by an error that nothing catches, tell the other ranks of it."""
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        before(kind, error, trace)
        _report(error)
        end_by(error)

    sys.excepthook = told


def _report(error: BaseException) -> None:
    """Leaves an error to torch's launcher, for its last lines, unless the program has done so (torch's `record`)."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None or Path(file).exists() or _world() is None:
        return
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

    with contextlib.suppress(OSError):  # a full disk: the error was printed
        try:
            raise error  # noqa: TRY301
        except BaseException as raised:  # the report has the traceback of what is caught
            ErrorHandler().record_exception(raised)


def end_by(error: BaseException) -> None:
    """What a rank does last that ends by an error: it tells all ranks of the world why, and then ends quickly."""
    tell(error)
    # When this rank has left its error to the launcher: what a rank says that goes on only follows from it.
    atexit.register(continue_stopped_ranks)
    end_quickly()


def end_quickly() -> None:
    """Makes the end of this process quick, which comes next."""
    # Else the interpreter looks for cycles among all objects several times: more than a second of processor time,
    # for which the launcher waits.
    gc.freeze()


def continue_stopped_ranks() -> None:
    """Lets ranks that a signal has stopped go on, for this one ends: else their launcher waits for them, 30 s.

    Without torch's launcher, whose children are the ranks, nothing is done: nobody would end them.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # gone since the folder was listed, or ended meanwhile
                state, parent = stat.read_text().rpartition(")")[2].split()[:2]
                if state == "T" and int(parent) == os.getppid():
                    os.kill(int(stat.parent.name), signal.SIGCONT)


def tell(error: BaseException) -> None:
    """Tells all ranks of the world that this one ends, and why; what was told first stays."""
    world = _world()
    if world is None:
        return
    error = getattr(error, "inner_exception", error)  # Dynamo puts its own around those of backends
    if _is_of_communication(error):  # that is another rank's failure
        return
    lines = f"rank {world.rank} failed: {type(error).__name__}: {error}".splitlines()
    what = error.what if isinstance(error, RankFailedError) else "\n".join(lines[:20])
    with contextlib.suppress(RuntimeError):  # if the store fails, no rank can be told
        store = AnsweringStore(world.store, _TELL_S)
        if not store.check([_FAILED]):
            store.set(_FAILED, what)
        if world.rank == 0:
            time.sleep(_READ_S)


def failed_elsewhere(store: dist.Store | AnsweringStore, waiting: str) -> RankFailedError | None:
    """What another rank has told in the store of the world, if any has; `waiting` says what this rank does."""
    if not store.check([_FAILED]):
        return None
    return RankFailedError(
        store.get(_FAILED).decode(),
        where=waiting,
        instead="see what that rank has printed: it failed first, and this rank waited for it",
    )


def refuse_failed_elsewhere(waiting: str) -> None:
    """Raises `RankFailedError` if another rank has told that it ends; `waiting` says what this rank does.

    A store that does not answer says nothing: the next collective will fail, and say more.
    """
    if not dist.is_initialized():
        return
    try:
        error = failed_elsewhere(AnsweringStore(default_store(), _ANSWER_S), f"rank {dist.get_rank()}, {waiting}")
    except RuntimeError:
        return
    if error is not None:
        raise error


@contextlib.contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turns errors of collectives into a `RankFailedError` that names the rank that failed first.

    `doing` says what this rank does.
    """
    try:
        yield
    except RuntimeError as error:
        refuse_lost_ranks(error, doing)
        raise


def refuse_lost_ranks(error: RuntimeError, doing: str) -> None:
    """Raises `RankFailedError`, which names the rank that failed first, in the place of an error of a collective."""
    if dist.is_initialized() and _is_of_communication(error):
        raise _explain(error, doing) from error


def _is_of_communication(error: BaseException) -> bool:
    if isinstance(error, FSDPCompileError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or _OF_COMMUNICATION.search(str(error)) is not None


def _explain(error: RuntimeError, doing: str) -> RankFailedError:
    where, said = f"rank {dist.get_rank()}, {doing}", str(error).strip().splitlines()[0]
    try:
        return _ask(where, doing, said)
    except RuntimeError as lost:
        return RankFailedError(
            f"the store through which ranks meet does not answer ({lost}), after a collective failed: {said}",
            where=where,
            instead="see why the process ended that holds the store, rank 0 or the launcher, or whether the link to "
            "its host was cut: this is what followed",
        )


def _ask(where: str, doing: str, said: str) -> RankFailedError:
    """What a rank has told, or the ranks that do not answer, or what each rank is doing if all do."""
    store, ranks = AnsweringStore(default_store(), _ANSWER_S), dist.get_world_size()
    keys = {f"{_ANSWERS}/{each}": each for each in range(ranks)}
    store.set(f"{_ANSWERS}/{dist.get_rank()}", doing)
    deadline_s = time.monotonic() + _ANSWER_S
    answered, told, pause_s = False, None, pauses(ranks)
    while not answered and told is None and time.monotonic() < deadline_s:
        time.sleep(next(pause_s))
        answered = store.check(list(keys))
        told = failed_elsewhere(store, where)
    if answered and told is None:
        time.sleep(_PAUSE_S)
        told = failed_elsewhere(store, where)
    if told is not None:
        return told
    if absent := [] if answered else store.missing(list(keys)):
        return RankFailedError(
            f"rank {', '.join(str(keys[key]) for key in absent)} does not answer: it was ended, is stopped or stuck, "
            f"or is cut off; a collective failed here: {said}",
            where=where,
            instead="see what became of that rank; the timeout of init_process_group() says how long others wait",
        )
    doings: dict[str, list[str]] = {}
    with contextlib.suppress(RuntimeError):  # the store's process may end first, which says nothing new
        for key in [*keys][:_COMPARED]:
            doings.setdefault(store.get(key).decode(), []).append(str(keys[key]))
    lines = [f"\nrank {', '.join(its[:8])}{', ...' if its[8:] else ''}: {each}" for each, its in doings.items()]
    return RankFailedError(
        f"a collective failed, and all ranks still answer: {said}{''.join(lines) if len(lines) > 1 else ''}",
        where=where,
        instead="see whether each rank runs the same modules in the same order (forwards, full_params and checkpoints "
        "are for all ranks, not inside of `if rank == 0:`), and whether the network lost a link",
    )
