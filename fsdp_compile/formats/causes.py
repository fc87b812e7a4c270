"""Errors of files, in one line that says what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint import CheckpointException

from fsdp_compile.errors import CheckpointError, FSDPCompileError

_REFUSED = re.compile(r"(?:unsupported GLOBAL|Unsupported global: GLOBAL|unsupported class) ([\w.]+)")
_SHARDS = ("ShardedTensor", "DTensor", "DeviceMesh")


def cause(error: BaseException) -> str:
    """What happened, in one line."""
    if isinstance(error, FSDPCompileError):
        return error.what
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror
    text = str(error)
    if refused := _REFUSED.search(text):
        return f"it refers to {refused[1]}, which no checkpoint needs{_hint(refused[1])}"
    first = next(iter(text.splitlines()), "").strip().split(". ")[0]  # torch goes on with advice
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


@contextmanager
def naming(what: str, path: Path) -> Iterator[None]:
    """Raise whatever is raised inside as an error that names a file.

    Args:
        what: What is done to it, such as "read".
        path: The file; an `OSError` may have a better one.

    Raises:
        CheckpointError: Something was raised. Errors of this package stay as they are.
    """
    try:
        yield
    except FSDPCompileError:
        raise
    except CheckpointException as error:  # no `Exception`
        first = error.failures[min(error.failures)][0]
        raise CheckpointError(f"cannot {what} {_named(first, path)}: {cause(first)}") from None
    except Exception as error:  # noqa: BLE001, RUF100  # files of other contents can raise anything
        raise CheckpointError(f"cannot {what} {_named(error, path)}: {cause(error)}") from None


def _named(error: BaseException, path: Path) -> Path:
    return Path(error.filename) if isinstance(error, OSError) and isinstance(error.filename, str) else path


def _hint(name: str) -> str:
    if any(shard in name for shard in _SHARDS):
        return ": a file of one rank's rows, which torch.distributed.checkpoint.save writes for others to read"
    return ""
