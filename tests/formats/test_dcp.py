"""`.metadata` from anywhere: what torch writes is read, all else is refused, and nothing is changed."""

from __future__ import annotations

import copyreg
import pickle
import random
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

from fsdp_compile.formats.dcp import SafeReader

pytestmark = pytest.mark.core

NO_CLASS = "it refers to "
NO_METADATA = "it is not the metadata of a checkpoint"
NOTHING = "it is no metadata of a checkpoint"


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
            MetadataIndex(name, [row, 0], index): _StorageInfo(f"__{index}_0.distcp", 100 * index, 100)
            for name in tensors
            for index, row in enumerate((0, 2))
        },
        storage_meta=StorageMeta(checkpoint_id=Path("/runs/a"), save_id="id"),
        version="1",
    )


def _read(folder: Path, pickled: bytes) -> Metadata:
    (folder / ".metadata").write_bytes(pickled)
    return SafeReader(folder).read_metadata()


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
        "it changes __getitem__, which no checkpoint needs",
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
        "it sets names on a StorageMeta that are not its fields",
    ),
    "an object with another class": (
        _build(_global(DCP, "StorageMeta") + pickle.EMPTY_TUPLE + pickle.NEWOBJ, (None, {"__class__": "changed"})),
        "it sets names on a StorageMeta that are not its fields",
    ),
    "an attribute": (
        _global("builtins", "getattr") + pickle.dumps((Metadata, "__init__"), 2)[2:-1] + b"R.",
        f"{NOTHING} (KeyError: '__init__')",
    ),
    "an extension": (pickle.EXT1 + b"\x07.", "it refers to extension 7"),
    "a class as metadata": (pickle.dumps(Metadata), NO_METADATA),
    "something else": (pickle.dumps({"storage_data": {}}), NO_METADATA),
    "without storage": (_with(lambda m: setattr(m, "storage_data", None)), f"{NOTHING} (AttributeError: "),
    "storage of another kind": (
        _with(lambda m: setattr(m, "storage_data", {"weight": m.storage_meta})),
        f"{NOTHING} (AttributeError: ",
    ),
    "a number for a file": (
        _with(lambda m: setattr(m, "storage_data", {"weight": _StorageInfo(3, 0, 1)})),  # type: ignore[arg-type]
        f"{NOTHING} (TypeError: ",
    ),
    "a chunk that is nowhere": (
        _with(lambda m: m.storage_data.pop(MetadataIndex("torch.float32", [2, 0]))),
        "it does not say where the 48 bytes of torch.float32 are",
    ),
    "a chunk that is too small": (
        _with(lambda m: setattr(m.storage_data[MetadataIndex("torch.float32", [2, 0])], "length", 47)),
        "it does not say where the 48 bytes of torch.float32 are",
    ),
    "a file elsewhere": (
        _with(lambda m: setattr(m, "storage_data", {"weight": _StorageInfo("../other", 0, 1)})),
        "it refers to ../other, a file elsewhere",
    ),
    "a chunk missing": (_with(lambda m: _chunks(m).pop()), "it does not have all of torch.float32"),
    "no layout": (
        _global("torch.serialization", "_get_layout") + pickle.dumps(("torch.load",), 2)[2:-1] + b"R.",
        f"{NOTHING} (KeyError: 'torch.load')",
    ),
    "metadata without fields": (_global(DCP, "Metadata") + pickle.EMPTY_TUPLE + pickle.NEWOBJ + b".", NOTHING),
    "no pickle": (b"foreign" * 100, f"{NOTHING} (KeyError: "),
    "nothing": (b"", f"{NOTHING} (EOFError: "),
    "cut off": (pickle.dumps(_metadata())[:-40], f"{NOTHING} (EOFError: "),
    "2^62 bytes": (pickle.BINBYTES8 + (2**62).to_bytes(8, "little") + b"few.", NOTHING),
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


Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it begins, and how long it is."""


def _is_read(folder: Path, shape: tuple[int, ...], chunks: list[Chunk]) -> bool:
    made = [ChunkStorageMetadata(torch.Size(starts), torch.Size(sizes)) for starts, sizes in chunks]
    tensor = TensorStorageMetadata(TensorProperties(torch.int8), torch.Size(shape), made)
    stored: dict[Any, Any] = {MetadataIndex("a", starts): _StorageInfo("__0_0.distcp", 0, 99) for starts, _ in chunks}
    try:
        _read(folder, pickle.dumps(Metadata({"a": tensor}, storage_data=stored)))
    except pickle.UnpicklingError:
        return False
    return True


COVERED: dict[str, tuple[tuple[int, ...], list[Chunk], bool]] = {
    "columns in rows": ((2, 4), [((0, 0), (2, 2)), ((0, 2), (1, 2)), ((1, 2), (1, 2))], True),
    "a number": ((), [((), ())], True),
    "nothing": ((0, 4), [], True),
    "ranks without rows": ((1, 2), [((0, 0), (1, 2)), ((1, 0), (0, 2)), ((1, 0), (0, 2))], True),
    "nothing of it": ((5,), [], False),
    "twice and not at all": ((4,), [((0,), (2,)), ((1,), (2,))], False),
    "before": ((4,), [((-1,), (5,))], False),
    "outside": ((4,), [((0,), (5,))], False),
    "of fewer dimensions": ((4, 1), [((0,), (4,))], False),
    "a number twice": ((), [((), ()), ((), ())], False),
    "no number": ((), [], False),
}


@pytest.mark.parametrize("name", COVERED)
def test_each_element_is_in_one_chunk(name: str, tmp_path: Path) -> None:
    shape, chunks, expected = COVERED[name]
    assert _is_read(tmp_path, shape, chunks) == expected


def test_drawn_chunks_are_judged_as_counting_does(tmp_path: Path) -> None:
    draw = random.Random(0)
    judged = set()
    for _ in range(500):
        counts = torch.zeros(2, 3)
        chunks: list[Chunk] = []
        for _ in range(draw.randint(1, 3)):
            (a, b), (c, d) = (sorted((draw.randint(0, length), draw.randint(0, length))) for length in counts.shape)
            counts[a:b, c:d] += 1
            chunks.append(((a, c), (b - a, d - c)))
        judged.add(bool((counts == 1).all()))
        assert _is_read(tmp_path, (2, 3), chunks) == bool((counts == 1).all()), chunks
    assert judged == {True, False}
