"""One process of a host lowers a graph, and the others that need it at that time wait, and load it.

All ranks of a host make the same graphs within seconds. Inductor keeps what it has compiled in a folder, and looks
there first; but ranks that look at the same time find nothing, and each compiles for itself. So the first rank that
comes to a graph holds a lock while it lowers it:

    <Inductor's folder>/fsdp_compile-locks/<digest of graph, inputs and settings>.lock

A rank that finds the lock held waits until it is free, and then asks Inductor, as always: it finds what the first one
has compiled, or, if that one has failed, compiles. Nothing is read but what Inductor itself reads, under Inductor's own
key, so a digest that tells too much or too little apart costs time, and never changes a result. The operating system
frees the lock of a process that ends, however it ends.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

from filelock import FileLock, Timeout

from fsdp_compile._torch.inductor import cache_folder, cache_in, looks_into_cache
from fsdp_compile.comm.failures import refuse_failed_elsewhere
from fsdp_compile.comm.groups import world_timeout
from fsdp_compile.lower.cache_folder import UnusableFolderError, check_folder, private_folder

T = TypeVar("T")
_log = logging.getLogger(__name__)
_LOOK_S: Final = 0.5
"""How often a rank that waits looks whether another one has failed."""
_PAUSE_S: Final = 0.05


def compile_once(graph: str, lower: Callable[[], T], settings: Mapping[str, Any] | None = None) -> T:
    """Lowers a graph; while another process of this host lowers the same one, waits, and then loads it.

    Args:
        graph: All that the compiled code depends on, as text.
        lower: Compiles by Inductor, which looks into its cache first.
        settings: Of Inductor for this compile alone.

    Raises:
        RankFailedError: If another rank fails while this one waits.
    """
    if not looks_into_cache(settings or {}):
        return lower()
    try:
        locks = check_folder(cache_folder())
    except UnusableFolderError as error:
        _say(f"each rank compiles for itself, in a folder of its own that is removed at its end: {error}")
        with cache_in(private_folder()):
            return lower()
    lock = FileLock(str(locks / f"{hashlib.sha256(graph.encode()).hexdigest()}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _wait(lock)
        return lower()
    try:
        return lower()
    finally:
        lock.release()


def _wait(lock: FileLock) -> None:
    """Returns when nobody holds the lock any more, or after half of the user's timeout."""
    # Half: ranks of other hosts may wait in a collective already, and this one would only begin to compile.
    timeout_s = world_timeout().total_seconds() / 2
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with suppress(Timeout), lock.acquire(timeout=_LOOK_S, poll_interval=_PAUSE_S):
            return
        refuse_failed_elsewhere("which waited for another process of its host to compile a graph that both need")
    _say(
        f"this rank compiles a graph itself, since another process of this host has compiled the same one for "
        f"{timeout_s:g} s and is not done; that takes time, and changes no result"
    )


@functools.cache
def _say(text: str) -> None:
    """Warns of a cause once."""
    _log.warning("fsdp_compile: %s", text)
