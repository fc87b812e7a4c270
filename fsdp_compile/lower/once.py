"""One process of a host lowers a graph, and the others that need it at that time wait, and load it.

All ranks of a host make the same graphs within seconds. Inductor keeps what it has compiled in a folder, and looks
there first; but ranks that look at the same time find nothing, and each compiles for itself. So the first rank that
comes to a graph holds a lock while it lowers it:

    <Inductor's folder>/fsdp_compile-locks/<digest of graph, inputs and settings>.lock

A rank that finds the lock held waits until it is free, and then asks Inductor, as always: it finds what the first one
has compiled, or, if that one has failed, compiles. Nothing is read but what Inductor itself reads, under Inductor's own
key, so a digest that tells too much or too little apart costs time, and never changes a result. The operating system
frees the lock of a process that ends, however it ends.

Inductor runs code that it finds in its folder: libraries, Python files and pickled graphs. So what another user could
have put there is never loaded: where the folder cannot be written, or others can write there, a private one is used.
"""

from __future__ import annotations

import atexit
import errno
import functools
import grp
import hashlib
import logging
import os
import pwd
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from filelock import FileLock, Timeout

from fsdp_compile._torch.inductor import cache_folder, cache_in, looks_into_cache
from fsdp_compile.comm.failures import refuse_failed_elsewhere
from fsdp_compile.comm.groups import world_timeout

T = TypeVar("T")
_log = logging.getLogger(__name__)
_LOOK_S: Final = 0.5
"""How often a rank that waits looks whether another one has failed."""
LOCKS: Final = "fsdp_compile-locks"
"""The folder of lock files, in Inductor's."""
LEAST_BYTES: Final = 32 * 2**20
"""What has to be free: several times what a model's graphs take. A compile that runs out of space fails."""


def compile_once(graph: str, lower: Callable[[], T], settings: Mapping[str, Any] | None = None) -> T:
    """Lowers a graph; while another process of this host lowers the same one, waits, and then loads it.

    `graph` has all that the compiled code depends on, as text. `lower` compiles by Inductor, which looks into its cache
    first, with these settings.

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
        held = lock.acquire(timeout=0)
    except Timeout:
        _wait(lock)
        return lower()
    with held:
        return lower()


def _wait(lock: FileLock) -> None:
    """Returns when nobody holds the lock any more, or after half of the user's timeout."""
    # Half: ranks of other hosts may wait in a collective already, and this one would only begin to compile.
    timeout_s = world_timeout().total_seconds() / 2
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with suppress(Timeout), lock.acquire(timeout=_LOOK_S, poll_interval=0.05):
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


class UnusableFolderError(Exception):
    """Inductor's folder cannot be used, or not safely; the text says why."""


def check_folder(folder: Path) -> Path:
    """Makes the folder, for this user alone, if there is none; returns the folder of its lock files.

    Raises:
        UnusableFolderError: If it cannot be written, has no room left, has no working locks, or others can write there.
    """
    locks = folder / LOCKS
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
        if found.st_uid not in (os.getuid(), 0):  # root's is as good
            raise UnusableFolderError(f"{folder} belongs to another user, number {found.st_uid}")
        writers = stat.S_IWOTH if _is_own_group(found.st_gid) else stat.S_IWGRP | stat.S_IWOTH
        if found.st_mode & writers:
            raise UnusableFolderError(f"others may write in {folder} (mode {stat.filemode(found.st_mode)}): chmod 700")
        locks.mkdir(exist_ok=True, mode=0o700)
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < LEAST_BYTES:
            what = f"{os.strerror(errno.ENOSPC)}, {free_bytes / 2**20:.1f} MiB free"
            raise UnusableFolderError(f"{folder} cannot be used: {what}")
        _check_locks(locks)
    except (OSError, NotImplementedError) as error:  # the second: of filelock, where a file system has no locks
        raise UnusableFolderError(f"{folder} cannot be used: {error}") from error
    return locks


def _is_own_group(number: int) -> bool:
    """Whether a group is the one of this user alone: systems that make one for each user let it write by default."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name == grp.getgrgid(number).gr_name
    except KeyError:  # no such entry, as in containers that run with any number
        return False


@functools.cache
def _check_locks(locks: Path) -> None:
    """Locks a file that no other process locks, once for each folder: a file system may have no locks."""
    own = locks / f"{uuid.uuid4().hex}.probe"
    try:
        with FileLock(str(own), timeout=0):
            pass
    except Timeout:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)) from None
    finally:
        own.unlink(missing_ok=True)


@functools.cache
def private_folder() -> Path:
    """A folder of this process alone, which is removed at its end."""
    made = Path(tempfile.mkdtemp(prefix="fsdp_compile-inductor-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
