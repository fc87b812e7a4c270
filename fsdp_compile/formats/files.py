"""Files of checkpoints: errors that name them, and `complete.json`, which is written last and has their digests."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsdp_compile.errors import CheckpointError, ConfigError, FSDPCompileError

MARKER = "complete.json"
_REFUSED = re.compile(r"(?:unsupported GLOBAL|Unsupported global: GLOBAL|unsupported class) ([\w.]+)")


@contextmanager
def naming(what: str, path: Path) -> Iterator[None]:
    """Raise what is raised inside, unless it is this package's, as a `CheckpointError`: "cannot {what} {path}: why"."""
    try:
        yield
    except FSDPCompileError:
        raise
    except BaseException as raised:
        if not (hasattr(raised, "failures") or isinstance(raised, Exception)):
            raise
        raise CheckpointError(named(raised, f"cannot {what}", path)) from None


def named(raised: BaseException, what: str, path: Path) -> str:
    """What was raised, as "{what} {path}: why"; of a `CheckpointException`, what was on the first rank, `{rank}`."""
    # That class of torch is no `Exception`, and torch is not imported here.
    failures: Any = getattr(raised, "failures", {0: (raised, None)})
    rank = min(failures)
    error = failures[rank][0]
    if isinstance(error, CheckpointError):
        return error.what
    file = error.filename if isinstance(error, OSError) and isinstance(error.filename, str) else path
    return f"{what.format(rank=rank)} {file}: {cause_of(error)}"


def cause_of(error: BaseException) -> str:
    """One line that says what happened, without the name of the file."""
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror
    if refused := _REFUSED.search(str(error)):
        return f"it refers to {refused[1]}, which no checkpoint of full values needs"
    first = next(iter(str(error).splitlines()), "").strip().split(". ")[0]  # torch goes on with advice
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


@dataclass(frozen=True)
class FileDigest:
    """What a file of a checkpoint must be."""

    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """The digest of a file on disk."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True)
class Marker:
    """The contents of `complete.json`; `run` is the run that wrote the checkpoint."""

    run: str
    step: int
    files: Mapping[str, FileDigest]


def read_marker(checkpoint: Path) -> Marker:
    """What the `complete.json` of a checkpoint says. Raises a `CheckpointError` if it is missing or damaged."""
    path = checkpoint / MARKER
    with naming("read", path):
        if not path.exists():
            raise CheckpointError(f"{checkpoint} is no complete checkpoint: it has no {MARKER}")
        size_of(path)
        read = json.loads(path.read_bytes())
        files = {name: FileDigest(int(each["size_bytes"]), str(each["sha256"])) for name, each in read["files"].items()}
        for name in files:
            is_in_folder = name == Path(name).name and name not in {"", ".."}
            if not (is_in_folder and name.isascii() and name.isprintable()):
                raise CheckpointError(f"{path} is damaged: {name[:99]!r} is no name of a file of the checkpoint")
        return Marker(str(read["run"]), int(read["step"]), files)


def check_size(path: Path, digest: FileDigest) -> None:
    """Raise a `CheckpointError` unless a file is there and has its size."""
    with naming("read", path):
        size = size_of(path)
    if size != digest.size_bytes:
        raise CheckpointError(f"{path} has {size} bytes instead of {digest.size_bytes}")


def check_contents(path: Path, digest: FileDigest) -> None:
    """Raise a `CheckpointError` unless a file is there and has its contents."""
    check_size(path, digest)
    with naming("read", path):
        found = FileDigest.of(path)
    if found != digest:
        raise CheckpointError(f"the contents of {path} have changed: its SHA-256 is not the one it was written with")


def size_of(path: Path) -> int:
    """The bytes of a file.

    Raises:
        OSError: There is none.
        CheckpointError: It is something else, such as a pipe or a device, whose end is never read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is no regular file")
    return status.st_size


def require_safetensors() -> None:
    """Raise a `ConfigError` if the package safetensors, which is optional, is not installed."""
    if find_spec("safetensors") is None:
        instead = "pip install 'fsdp-compile[safetensors]'"
        raise ConfigError("this takes the package safetensors, which is not installed", instead=instead)


def sync(path: Path) -> None:
    """Wait until a file, or the names of a folder's files, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
