"""Files of torch.distributed.checkpoint (DCP): nothing in them is executed, and errors name them.

DCP's `.metadata` is a pickle, and so are the values in its shards that are no tensors (learning rates and the like).
Torch loads both with all that pickle can do. What is allowed here holds values and does nothing else.
"""

from __future__ import annotations

import io
import pickle
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import metadata as kinds
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from fsdp_compile._torch.distributed import MemoryFormat, StorageInfo
from fsdp_compile.errors import CheckpointError
from fsdp_compile.formats.files import MARKER, FileDigest, check_contents, naming

METADATA = ".metadata"


class SafeReader(FileSystemReader):
    """Reads a checkpoint of DCP whose `.metadata` may come from anywhere; it is read once."""

    _metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:  # type: ignore[override, unused-ignore]  # a rank of its own has no metadata here
        """What is in the checkpoint; its shards are files of its folder, and have each element of each tensor once.

        Raises:
            OSError: Its `.metadata` cannot be read.
            pickle.UnpicklingError: That file is anything else than the metadata of a checkpoint.
        """
        if self._metadata is None:
            # No more can be read of this than there is, whatever lengths it claims.
            pickled = io.BytesIO((Path(self.path) / METADATA).read_bytes())
            try:
                self._metadata = _checked(_MetadataUnpickler(pickled).load())
            except pickle.UnpicklingError:
                raise
            except Exception as error:  # noqa: BLE001, RUF100  # contents of another kind make anything of unpickling
                what = f"{type(error).__name__}: {error}"
                raise pickle.UnpicklingError(f"it is no metadata of a checkpoint ({what})") from None
        return self._metadata

    def check(self, files: Mapping[str, FileDigest], rank: int = 0, ranks: int = 1) -> None:
        """Raise a `CheckpointError` unless the metadata and a rank's share of the other files are what was written."""
        path = Path(self.path)
        for name in sorted({METADATA, *sorted(files)[rank::ranks]} & files.keys()):
            check_contents(path / name, files[name])
        with naming("read", path / METADATA):
            stored = self.read_metadata().storage_data.values()
        if left := {METADATA, *(info.relative_path for info in stored)} - files.keys():
            raise CheckpointError(f"{path / MARKER} does not name {min(left)}")


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
    """Writes a checkpoint of DCP; an `OSError` of a file has the file's name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = NamingFiles()


class NamingFiles(FileSystem):
    """Files that are written; for `torch.save`, a full disk is an "unexpected pos", and closing one names no file."""

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file; an `OSError` of it has its name."""
        stream = None
        try:
            with _Stream(io.FileIO(path, mode)) as stream:
                yield stream
        except Exception as error:
            cause = error if stream is None or stream.failure is None else stream.failure
            if not isinstance(cause, OSError):
                raise
            raise OSError(cause.errno, cause.strerror, str(path)) from None


class _Stream(io.BufferedWriter):
    failure: OSError | None = None  # of the first write that failed

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise

    def fileno(self) -> int:
        # Called by `fsync`, before which torch 2.13 does not flush `.metadata`.
        self.flush()
        return super().fileno()


def _checked(metadata: Any) -> Metadata:
    if type(metadata) is not Metadata:  # a class, which unpickles as well as its instances, has attributes too
        raise pickle.UnpicklingError("it is not the metadata of a checkpoint")
    for info in metadata.storage_data.values():
        if info.relative_path != Path(info.relative_path).name:
            raise pickle.UnpicklingError(f"it refers to {info.relative_path}, a file elsewhere")
    for name, value in metadata.state_dict_metadata.items():
        if not isinstance(value, TensorStorageMetadata):
            continue
        if not _is_covered(value):
            raise pickle.UnpicklingError(f"it does not have all of {name}")
        for chunk in value.chunks:
            needed = chunk.sizes.numel() * value.properties.dtype.itemsize
            info = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            # Ranks may share those without elements.
            if needed and (info is None or info.length < needed):
                raise pickle.UnpicklingError(f"it does not say where the {needed} bytes of {name} are")
    return metadata


def _is_covered(tensor: TensorStorageMetadata) -> bool:
    """Whether chunks have each element of a tensor once; where there is none, a load leaves values as they are."""
    # The tensor is cut at every border of a chunk. Each part must be in one chunk.
    cuts = [{0, whole} for whole in tensor.size]
    for chunk in tensor.chunks:
        for borders, start, size in zip(cuts, chunk.offsets, chunk.sizes, strict=True):
            borders |= {start, start + size}
    grid = [sorted(borders) for borders in cuts]
    if any((borders[0], borders[-1]) != (0, whole) for borders, whole in zip(grid, tensor.size, strict=True)):
        return False
    times = torch.zeros([len(borders) - 1 for borders in grid], dtype=torch.int32)
    for chunk in tensor.chunks:
        each = zip(grid, chunk.offsets, chunk.sizes, strict=True)
        times[tuple(slice(bisect_left(cut, start), bisect_left(cut, start + size)) for cut, start, size in each)] += 1
    return bool((times == 1).all())


_DATACLASSES = (*(getattr(kinds, name) for name in kinds.__all__), StorageInfo)
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_PATHS = {"PosixPath": PurePosixPath, "WindowsPath": PureWindowsPath}  # pure ones can be made on any system
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in (*_DATACLASSES, MemoryFormat, OrderedDict)},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{(f"pathlib{m}", p + name): _PATHS[name] for m in ("", "._local") for p in ("", "Pure") for name in _PATHS},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _LAYOUTS.__getitem__,  # not torch's, which has a cache
    # CPython 3.11.2, for one, pickles members of an enum as attributes.
    ("builtins", "getattr"): lambda _, name: MemoryFormat[name],
}


def _build(unpickler: Any) -> None:
    """The opcode BUILD, which gives attributes to anything: to classes and functions too, and changes the process."""
    state = unpickler.stack.pop()
    instance = unpickler.stack[-1]
    if type(instance) not in _DATACLASSES:
        what = getattr(instance, "__name__", f"a {type(instance).__name__}")
        raise pickle.UnpicklingError(f"it changes {what}, which no checkpoint needs")
    if isinstance(instance, TensorProperties):
        instance.__setstate__(state)
    elif type(state) is not dict or any(not isinstance(name, str) or name.startswith("__") for name in state):
        raise pickle.UnpicklingError(f"it sets names on a {type(instance).__name__} that are not its fields")
    else:
        vars(instance).update(state)


class _MetadataUnpickler(pickle._Unpickler):
    """The unpickler in Python, 1.9 s for 20,000 chunks: that in C, three times faster, cannot refuse an opcode."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = pickle._Unpickler.dispatch | {pickle.BUILD[0]: _build}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint needs")
        return _ALLOWED[module, name]

    def get_extension(self, code: int) -> None:
        # Pickle keeps what a code stood for once, and does not ask `find_class` again.
        raise pickle.UnpicklingError(f"it refers to extension {code}, which no checkpoint needs")
