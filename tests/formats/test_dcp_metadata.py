"""`.metadata` from anywhere: what torch writes is read, all else is refused, and nothing is changed."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from fsdp_compile.formats.dcp_metadata import read_metadata

pytestmark = pytest.mark.core

NO_CLASS = "it refers to "
NO_METADATA = "it is not the metadata of a checkpoint"


def _metadata() -> Metadata:
    """One of everything that torch writes."""
    tensors = {
        str(dtype): TensorStorageMetadata(
            TensorProperties(dtype, layout, memory_format=memory_format),
            torch.Size([4, 6]),
            [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 6])) for row in (0, 2)],
        )
        for dtype, layout, memory_format in [
            (torch.float32, torch.strided, torch.contiguous_format),
            (torch.bfloat16, torch.sparse_coo, torch.channels_last),
            (torch.float8_e4m3fn, torch.sparse_csr, torch.preserve_format),
        ]
    }
    return Metadata(
        state_dict_metadata={**tensors, "lr": BytesStorageMetadata()},
        planner_data={"lr": ("groups", 0, "lr")},
        storage_data={
            MetadataIndex(name, [row, 0], index): _StorageInfo(f"__{index}_0.distcp", 10 * index, 10)
            for name in tensors
            for index, row in enumerate((0, 2))
        },
        storage_meta=StorageMeta(checkpoint_id=Path("/runs/a"), save_id="id"),
        version="1",
    )


def _read(folder: Path, pickled: bytes) -> Metadata:
    (folder / ".metadata").write_bytes(pickled)
    return read_metadata(folder / ".metadata")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_torch_writes_is_read(protocol: int, tmp_path: Path) -> None:
    expected = _metadata()
    read = _read(tmp_path, pickle.dumps(expected, protocol))
    assert read.storage_meta is not None
    assert type(read.storage_meta.checkpoint_id) is PurePosixPath
    assert expected.storage_meta is not None
    expected.storage_meta.checkpoint_id = PurePosixPath("/runs/a")
    assert read == expected


def test_the_path_of_another_system_is_a_path(tmp_path: Path) -> None:
    pickled = pickle.dumps(_metadata(), 2).replace(b"PosixPath", b"WindowsPath")
    read = _read(tmp_path, pickled)
    assert read.storage_meta is not None
    assert type(read.storage_meta.checkpoint_id) is PureWindowsPath


def test_members_of_an_enum_may_be_attributes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CPython 3.11.2 pickles them."""
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda member, _: (getattr, (_MEM_FORMAT_ENCODING, member.name))
    )
    pickled = pickle.dumps(_metadata())
    assert b"getattr" in pickled
    assert _read(tmp_path, pickled).state_dict_metadata == _metadata().state_dict_metadata


class Reduced:
    """Pickled as a call, or as an object that gets a state."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def _with(change: Callable[[Metadata], object]) -> bytes:
    metadata = _metadata()
    change(metadata)
    return pickle.dumps(metadata)


def _chunks(metadata: Metadata) -> list[ChunkStorageMetadata]:
    tensor = metadata.state_dict_metadata["torch.float32"]
    assert isinstance(tensor, TensorStorageMetadata)
    return tensor.chunks


def _build(what: bytes, state: object) -> bytes:
    """Opcodes that push `what`, and give it a state."""
    pushed = pickle.dumps(state, 2)[2:-1]  # without its PROTO and STOP
    return pickle.PROTO + b"\x02" + what + pushed + pickle.BUILD + pickle.STOP


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


DCP = "torch.distributed.checkpoint.metadata"
MEMBER = _global(DCP, "_MEM_FORMAT_ENCODING") + b"K\x00" + pickle.TUPLE1 + pickle.REDUCE
REFUSED: dict[str, tuple[bytes, str]] = {
    "a call": (_with(lambda m: setattr(m, "planner_data", Reduced(print, ("executed",)))), NO_CLASS),
    "a class of another module": (_build(_global("torch.serialization", "MAP_LOCATION"), {}), NO_CLASS),
    "a function with a state": (
        _build(_global("torch.serialization", "_get_layout"), {"cache": {"torch.strided": "changed"}}),
        "it changes _layout, which no checkpoint needs",
    ),
    "a class with a state": (
        _build(_global(DCP, "StorageMeta"), (None, {"load_id": "changed"})),
        "it changes StorageMeta, which no checkpoint needs",
    ),
    "an enum with a state": (
        _build(_global(DCP, "_MEM_FORMAT_ENCODING"), (None, {"changed": True})),
        "it changes _MEM_FORMAT_ENCODING, which no checkpoint needs",
    ),
    "a member with a state": (
        _build(MEMBER, {"_value_": 1}),
        "it changes a _MEM_FORMAT_ENCODING, which no checkpoint needs",
    ),
    "an object with a method": (
        _build(_global(DCP, "StorageMeta") + pickle.EMPTY_TUPLE + pickle.NEWOBJ, {"__reduce_ex__": "changed"}),
        "it gives a StorageMeta what is no field of it",
    ),
    "an object with another class": (
        _build(_global(DCP, "StorageMeta") + pickle.EMPTY_TUPLE + pickle.NEWOBJ, (None, {"__class__": "changed"})),
        "it gives a StorageMeta what is no field of it",
    ),
    "an attribute": (
        _global("builtins", "getattr") + pickle.dumps((Metadata, "__init__"), 2)[2:-1] + b"R.",
        "it refers to builtins.getattr, which no checkpoint needs otherwise",
    ),
    "an extension": (pickle.EXT1 + b"\x07.", "it refers to extension 7"),
    "a class in the place of an object": (
        _with(lambda m: setattr(m, "storage_meta", StorageMeta)),
        "its storage_meta is of another kind",
    ),
    "a class as metadata": (pickle.dumps(Metadata), NO_METADATA),
    "something else": (pickle.dumps({"storage_data": {}}), NO_METADATA),
    "without storage": (_with(lambda m: setattr(m, "storage_data", None)), NO_METADATA),
    "storage of another kind": (
        _with(lambda m: setattr(m, "storage_data", {"weight": m.storage_meta})),
        "it does not say in which file a tensor is",
    ),
    "a number for a file": (
        _with(lambda m: setattr(m, "storage_data", {"weight": _StorageInfo(3, 0, 1)})),  # type: ignore[arg-type]
        "it does not say in which file a tensor is",
    ),
    "a file elsewhere": (
        _with(lambda m: setattr(m, "storage_data", {"weight": _StorageInfo("../other", 0, 1)})),
        "it refers to ../other, a file elsewhere",
    ),
    "a chunk missing": (_with(lambda m: _chunks(m).pop()), "it does not have all of torch.float32"),
    "no chunks": (_with(lambda m: _chunks(m).clear()), "it does not have all of torch.float32"),
    "a negative chunk": (
        _with(lambda m: setattr(_chunks(m)[0], "sizes", torch.Size([-2, -6]))),
        "it does not have all of torch.float32",
    ),
    "a chunk outside": (
        _with(lambda m: setattr(_chunks(m)[0], "offsets", torch.Size([3, 0]))),
        "it does not have all of torch.float32",
    ),
    "no layout": (
        _global("torch.serialization", "_get_layout") + pickle.dumps(("torch.load",), 2)[2:-1] + b"R.",
        "it refers to a layout that does not exist",
    ),
    "metadata without fields": (_global(DCP, "Metadata") + pickle.EMPTY_TUPLE + pickle.NEWOBJ + b".", NO_METADATA),
    "no pickle": (b"foreign" * 100, "it is no metadata of a checkpoint (KeyError: "),
    "nothing": (b"", "it is no metadata of a checkpoint (EOFError: "),
    "cut off": (pickle.dumps(_metadata())[:-40], "it is no metadata of a checkpoint (EOFError: "),
    "2^62 bytes": (pickle.BINBYTES8 + (2**62).to_bytes(8, "little") + b"few.", "it is no metadata of a checkpoint"),
    "an index of 2^31": (pickle.LONG_BINGET + b"\xff\xff\xff\x7f.", "Memo value not found"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_all_else_is_refused_and_changes_nothing(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg._extension_cache, 7, print)  # type: ignore[attr-defined]
    shared = (_get_layout, StorageMeta, Metadata, _MEM_FORMAT_ENCODING, _MEM_FORMAT_ENCODING(0))
    before = [dict(vars(each)) for each in shared]
    pickled, message = REFUSED[what]
    with pytest.raises(pickle.UnpicklingError) as caught:
        _read(tmp_path, pickled)
    assert message in str(caught.value)
    assert [dict(vars(each)) for each in shared] == before
