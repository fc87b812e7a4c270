"""What it costs many ranks to agree on the collectives that they compile: requests to the store, and seconds.

The ranks are threads of a few processes, with a connection to one `TCPStore` each, and call what real ranks call. They
share the cores of this machine, which real ranks do not, and so look more seldom than those would: seconds are upper
bounds. What a request takes of the process that holds the store is measured; how busy ranks with cores of their own
would keep it, while they wait, is calculated from that.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from benchmarks.command import Columns, finish, parser, quiet, table
from fsdp_compile.comm.failures import AnsweringStore, pauses
from fsdp_compile.comm.rendezvous import Rendezvous
from fsdp_compile.errors import RankFailedError

T = TypeVar("T")
_TIMEOUT_S = 600.0
_REQUESTS_OF_A_LOOK = 4
"""Of a rank that waits: for what it waits for, and for three kinds of failures."""


class Case(StrEnum):
    """What the last rank does, while the others come at once."""

    ALIKE = "comes at once"
    LATE = "comes late"
    OTHER = "compiles other collectives"
    FAILS = "fails, late"


_LATE = (Case.LATE, Case.FAILS)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        ranks: Of the group.
        processes: In which the ranks are threads.
        late_s: How late the last rank comes where it comes late.
    """

    ranks: int
    processes: int
    late_s: float


@dataclasses.dataclass(frozen=True)
class Visit:
    """One round of one rank; times of the clock that all processes share.

    Attributes:
        requests: To the store.
        began_s: When the rank came.
        ended_s: When it knew the outcome.
    """

    requests: int
    began_s: float
    ended_s: float


class _CountedStore(AnsweringStore):
    """Counts its requests."""

    requests = 0

    def _ask(self, method: Callable[..., T], *arguments: Any) -> T:
        self.requests += 1
        return super()._ask(method, *arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("agreement", "Requests to the store, and seconds, until many ranks have agreed.")
    made.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1000], metavar="N", help="default: 8 64 1000")
    made.add_argument(
        "--processes", type=int, default=4, metavar="N", help="that the ranks are threads of (default: 4)"
    )
    made.add_argument("--late", type=float, default=10.0, metavar="S", help="how late one rank is (default: 10)")
    arguments = made.parse_args(argv)
    quiet()
    if arguments.smoke:
        arguments.ranks, arguments.processes, arguments.late = [4], 2, 0.2
    rows: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        rows += run(Plan(ranks, min(arguments.processes, ranks), arguments.late))
    columns: Columns = {
        "ranks": str,
        "the last one": str,
        "requests_per_rank": lambda count: f"{count:.1f}",
        "store_us": lambda us: f"{us:.0f} us",
        "busy_share": lambda share: f"{share:.0%}",
        "seconds": lambda seconds: f"{seconds:.2f} s",
    }
    table("from the last rank's coming until all know", rows, columns)
    return finish(arguments, {"processes": arguments.processes, "late_s": arguments.late}, rows)


def run(plan: Plan) -> list[dict[str, Any]]:
    """All cases with one number of ranks."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    try:
        port = ours.recv()
        barrier = spawn.Barrier(plan.processes + 1)
        results = spawn.Queue()
        members = [list(range(number, plan.ranks, plan.processes)) for number in range(plan.processes)]
        workers = [spawn.Process(target=_work, args=(plan, mine, port, barrier, results)) for mine in members]
        for worker in workers:
            worker.start()
        rows = [_case(plan, case, server.pid or 0, barrier, results) for case in Case]
        for worker in workers:
            worker.join()
    finally:
        server.terminate()
        server.join()
    return rows


def _case(plan: Plan, case: Case, server: int, barrier: Any, results: Any) -> dict[str, Any]:
    barrier.wait(_TIMEOUT_S)
    before_s = _processor_s(server)
    visits: list[Visit] = [visit for _ in range(plan.processes) for visit in results.get(timeout=_TIMEOUT_S)]
    ended_s = max(visit.ended_s for visit in visits)
    requests = sum(visit.requests for visit in visits)
    request_s = (_processor_s(server) - before_s) / requests
    longest_s = next(itertools.islice(pauses(plan.ranks), 30, None))
    return {
        "ranks": plan.ranks,
        "the last one": case.value,
        "requests_per_rank": requests / plan.ranks,
        "store_us": request_s * 1e6,
        "busy_share": plan.ranks * _REQUESTS_OF_A_LOOK * request_s / longest_s,
        "seconds": ended_s - max(visit.began_s for visit in visits),
    }


def _serve(answers: Any) -> None:
    """Holds the store until the process is ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers.send(store.port)
    threading.Event().wait()


def _work(plan: Plan, members: list[int], port: int, barrier: Any, results: Any) -> None:
    """Some of the ranks, in one process."""
    stores = [dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in members]
    pairs = list(zip(members, stores, strict=True))
    with ThreadPoolExecutor(len(members)) as pool:
        for case in Case:
            barrier.wait(_TIMEOUT_S)
            results.put(list(pool.map(lambda pair, case=case: _visit(plan, case, *pair), pairs)))


def _visit(plan: Plan, case: Case, rank: int, store: dist.TCPStore) -> Visit:
    own = _CountedStore(dist.PrefixStore(case.name, store), _TIMEOUT_S)
    world = _CountedStore(dist.PrefixStore(f"world of {case.name}", store), _TIMEOUT_S)
    room = Rendezvous(own, case.name, tuple(range(plan.ranks)), rank, _TIMEOUT_S, world)
    is_last = rank == plan.ranks - 1
    time.sleep(plan.late_s if is_last and case in _LATE else 0)
    began_s = time.monotonic()
    digest = "other" if is_last and case is Case.OTHER else "same"
    if is_last and case is Case.FAILS:
        room.tell(RankFailedError("it ran out of memory", where="rank", instead="a smaller batch"))
    else:
        _compare(room, digest, case)
    return Visit(own.requests + world.requests, began_s, time.monotonic())


def _compare(room: Rendezvous, digest: str, case: Case) -> None:
    try:
        theirs = room.first(1, digest, f"collectives of {digest}")
        room.meet(1)
    except RankFailedError:
        assert case is Case.FAILS
        return
    assert case is not Case.FAILS
    assert (theirs is not None) == (case is Case.OTHER and digest == "other")


def _processor_s(process: int) -> float:
    """What a process has used of the processors, in s."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
