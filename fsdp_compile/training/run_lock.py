"""One process group at a time trains in a run's folder: two would write over each other's files."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdp_compile.errors import ConfigError

_NAME = ".lock"


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder; it ends with this process, whatever ends that.

    File systems that have no locks are used without one.

    Raises:
        ConfigError: Another process holds it, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _NAME).open("w")
    except OSError as error:
        raise ConfigError(
            f"cannot write in {folder}: {error.strerror}", where="--out", instead="a folder that you may write in"
        ) from None
    with file:
        try:
            # Of this process alone: compilers that it forks, and that may outlive it, do not hold it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ConfigError(
                    f"another process trains in {folder}", where="the run's folder", instead="wait until it has ended"
                ) from None
        yield
