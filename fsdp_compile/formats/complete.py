"""`complete.json`, which `fsdp-compile train` writes last into the folder of a checkpoint: the digest of every file."""

from __future__ import annotations

import hashlib
import json
import reprlib
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_compile.errors import CheckpointError

MARKER = "complete.json"


@dataclass(frozen=True)
class FileDigest:
    """What a file of a checkpoint must be."""

    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """That of a file on disk."""
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True)
class Marker:
    """The contents of `complete.json`; `run` is the run that wrote the checkpoint."""

    run: str
    step: int
    files: Mapping[str, FileDigest]


def read_marker(checkpoint: Path) -> Marker:
    """What the `complete.json` of a checkpoint says.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    path = checkpoint / MARKER
    try:
        size_of(path)
        return _parse(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} is no complete checkpoint: it has no {MARKER}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def check_size(path: Path, digest: FileDigest) -> None:
    """Compare a file's size with what it must be.

    Raises:
        CheckpointError: It differs, or there is no such file.
    """
    try:
        size = size_of(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if size != digest.size_bytes:
        raise CheckpointError(f"{path} has {size} bytes instead of {digest.size_bytes}")


def check_contents(path: Path, digest: FileDigest) -> None:
    """Compare a file's contents with what they must be.

    Raises:
        CheckpointError: They differ, or there is no such file.
    """
    check_size(path, digest)
    try:
        found = FileDigest.of(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
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


def _parse(text: bytes) -> Marker:
    read = json.loads(text)
    files = {name: FileDigest(int(each["size_bytes"]), str(each["sha256"])) for name, each in read["files"].items()}
    for name in files:
        if name != Path(name).name or name in {"", ".."}:
            raise ValueError(f"{reprlib.repr(name)} is a file elsewhere")
        if not (name.isascii() and name.isprintable()):
            raise ValueError(f"{reprlib.repr(name)} is no name of a file")
    return Marker(str(read["run"]), int(read["step"]), files)
