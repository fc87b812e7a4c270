"""Which folder Inductor may use: its own, or, where that cannot be written or others can write there, a private one.

Inductor runs code that it finds in its folder: libraries, Python files and pickled graphs. So what another user could
have put there is never loaded.
"""

from __future__ import annotations

import atexit
import errno
import functools
import grp
import os
import pwd
import shutil
import stat
import tempfile
import uuid
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

LOCKS: Final = "fsdp_compile-locks"
"""The folder of lock files, in Inductor's."""
LEAST_BYTES: Final = 32 * 2**20
"""What has to be free: several times what a model's graphs take. A compile that runs out of space fails."""
_ROOT = 0


class UnusableFolderError(Exception):
    """Inductor's folder cannot be used, or not safely; the text says why."""


def check_folder(folder: Path) -> Path:
    """Makes the folder, for this user alone, if there is none.

    Returns:
        The folder of its lock files.

    Raises:
        UnusableFolderError: If it cannot be written, has no room left, has no working locks, or others can write there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_owner(folder)
        locks = folder / LOCKS
        locks.mkdir(exist_ok=True, mode=0o700)
        _check_room(folder)
        _check_locks(locks)
    except (OSError, NotImplementedError) as error:  # the second: of filelock, where a file system has no locks
        raise UnusableFolderError(f"{folder} cannot be used: {error}") from error
    return locks


def _check_owner(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid not in (os.getuid(), _ROOT):
        raise UnusableFolderError(f"{folder} belongs to another user, number {found.st_uid}")
    writers = stat.S_IWOTH if _is_own_group(found.st_gid) else stat.S_IWGRP | stat.S_IWOTH
    if found.st_mode & writers:
        raise UnusableFolderError(f"others may write in {folder} (mode {stat.filemode(found.st_mode)}): chmod 700")


def _is_own_group(number: int) -> bool:
    """Whether a group is the one of this user alone: systems that make one for each user let it write by default."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name == grp.getgrgid(number).gr_name
    except KeyError:  # no such entry, as in containers that run with any number
        return False


def _check_room(folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < LEAST_BYTES:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {free_bytes / 2**20:.1f} MiB free")


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
