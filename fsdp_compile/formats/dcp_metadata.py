"""The `.metadata` of torch.distributed.checkpoint (DCP), which may come from anywhere, read without executing anything.

It is a pickle. Torch loads it with all that pickle can do; what is allowed here holds values and does nothing else.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from fsdp_compile._torch.distributed import MemoryFormat, StorageInfo

METADATA = ".metadata"


def read_metadata(path: Path) -> Metadata:
    """What a checkpoint consists of, as its `.metadata` says; its shards are files of the same folder.

    Raises:
        OSError: The file cannot be read.
        pickle.UnpicklingError: It is anything else than the metadata of a checkpoint.
    """
    pickled = io.BytesIO(path.read_bytes())  # of which no more can be read than there is, whatever lengths it claims
    try:
        return _checked(_MetadataUnpickler(pickled).load())
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # noqa: BLE001, RUF100  # contents of another kind make anything of unpickling
        raise pickle.UnpicklingError(f"it is no metadata of a checkpoint ({type(error).__name__}: {error})") from None


def _checked(metadata: Any) -> Metadata:
    # Exact types: a class, which unpickles as well as its instances, has attributes too.
    if type(metadata) is not Metadata or type(metadata.storage_data) is not dict:
        raise pickle.UnpicklingError("it is not the metadata of a checkpoint")
    if not isinstance(getattr(metadata, "storage_meta", None), StorageMeta | None):
        raise pickle.UnpicklingError("its storage_meta is of another kind")
    for info in metadata.storage_data.values():
        if type(info) is not StorageInfo or type(info.relative_path) is not str:
            raise pickle.UnpicklingError("it does not say in which file a tensor is")
        name = info.relative_path
        if name != Path(name).name:
            raise pickle.UnpicklingError(f"it refers to {name}, a file elsewhere")
    for name, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata) and not _is_covered(tensor):
            raise pickle.UnpicklingError(f"it does not have all of {name}")
    return metadata


def _is_covered(tensor: TensorStorageMetadata) -> bool:
    """Whether the chunks of a tensor are as large as it is; where there is none, a load leaves values as they are."""
    for chunk in tensor.chunks:
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True):
            if not 0 <= offset <= offset + size <= whole:
                return False
    return sum(prod(chunk.sizes) for chunk in tensor.chunks) == prod(tensor.size)


def _layout(name: object) -> torch.layout:
    """The layout of a name such as "torch.strided": `torch.serialization._get_layout`, without its cache."""
    layout = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError("it refers to a layout that does not exist")
    return layout


def _enum_member(kind: Any, name: object) -> Enum:
    """What `getattr` is called for: CPython 3.11.2, for one, pickles members of an enum as attributes."""
    if kind is not MemoryFormat or not isinstance(name, str):
        raise pickle.UnpicklingError("it refers to builtins.getattr, which no checkpoint needs otherwise")
    found: Enum = kind[name]
    return found


_DATACLASSES = (*(getattr(dcp, name) for name in dcp.__all__), StorageInfo)
_PATHS = {
    "PosixPath": PurePosixPath,
    "WindowsPath": PureWindowsPath,  # which can be made on any system, unlike its subclass
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
}
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in (*_DATACLASSES, MemoryFormat, OrderedDict)},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{(module, name): path for module in ("pathlib", "pathlib._local") for name, path in _PATHS.items()},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    ("builtins", "getattr"): _enum_member,
}
"""What the pickle of a `Metadata` refers to, by module and name."""


def _build(unpickler: Any) -> None:
    """The opcode BUILD: it gives an object its attributes, and is allowed to do so to instances of the dataclasses.

    Pickle lets it change classes and functions as well, and with them the process.
    """
    state = unpickler.stack.pop()
    instance = unpickler.stack[-1]
    kind = type(instance)
    if kind not in _DATACLASSES:
        what = getattr(instance, "__name__", f"a {kind.__name__}")
        raise pickle.UnpicklingError(f"it changes {what}, which no checkpoint needs")
    set_state = getattr(kind, "__setstate__", None)
    if set_state is not None:
        set_state(instance, state)
        return
    special = [name for name in state if not isinstance(name, str) or name.startswith("__")]
    if type(state) is not dict or special:
        raise pickle.UnpicklingError(f"it gives a {kind.__name__} what is no field of it")
    vars(instance).update(state)


class _MetadataUnpickler(pickle._Unpickler):
    """The unpickler that is written in Python: the other one, in C, has no place to refuse an opcode.

    It takes three times as long: 1.9 s for 20,000 chunks.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = pickle._Unpickler.dispatch | {pickle.BUILD[0]: _build}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint needs") from None

    def get_extension(self, code: int) -> None:
        # Pickle keeps what a code stood for once, and does not ask `find_class` again.
        raise pickle.UnpicklingError(f"it refers to extension {code}, which no checkpoint needs")
