"""Files of torch.distributed.checkpoint (DCP): nothing in them is executed, and errors name them.

DCP's `.metadata` is a pickle, and so are the values in its shards that are no tensors (learning rates and the like).
Torch loads both with all that pickle can do.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from fsdp_compile.formats.dcp_metadata import METADATA, read_metadata


class SafeReader(FileSystemReader):
    """Reads a checkpoint of DCP whose `.metadata` may come from anywhere; it is read once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:  # type: ignore[override, unused-ignore]  # a rank of its own has no metadata here
        """What is in the checkpoint.

        Raises:
            OSError: Its `.metadata` cannot be read.
            pickle.UnpicklingError: That file is anything else than the metadata of a checkpoint.
        """
        if self._metadata is None:
            self._metadata = read_metadata(Path(self.path) / METADATA)
            # As torch's reader does.
            self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
            self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class SafePlanner(DefaultLoadPlanner):
    """Loads values that are no tensors (`weights_only`) without executing anything in their pickles."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value into the state that is loaded."""
        name = read_item.dest_index.fqn
        if isinstance(self.state_dict[name], torch.Tensor):
            raise pickle.UnpicklingError(f"{name} should be a tensor")
        # Torch's planner unpickles whatever it gets, so it gets what was pickled here.
        ours = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), ours)
        ours.seek(0)
        super().load_bytes(read_item, ours)


class NamingWriter(FileSystemWriter):
    """Writes a checkpoint of DCP; an `OSError` of a file has the file's name.

    `torch.save` reports a full disk as "unexpected pos", and what a stream raises while it is closed names no file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = _NamingFiles()


class _NamingFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Iterator[io.IOBase]:
        first: list[OSError] = []
        try:
            with super().create_stream(path, mode) as stream:
                yield cast(io.IOBase, _Stream(stream, first))
        except Exception as error:
            cause = first[0] if first else error
            if not isinstance(cause, OSError):
                raise
            raise OSError(cause.errno, cause.strerror, str(path)) from None


class _Stream:
    """A file that notes the error of a write, whatever others make of it."""

    def __init__(self, stream: Any, errors: list[OSError]) -> None:
        self._stream = stream
        self._errors = errors

    def write(self, data: Any) -> int:
        try:
            return self._stream.write(data)
        except OSError as error:
            self._errors.append(error)
            raise

    def fileno(self) -> int:
        # Asked for by `fsync`, before which torch 2.13 does not flush `.metadata`.
        self._stream.flush()
        return self._stream.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
