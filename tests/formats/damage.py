"""What happens to files of checkpoints, by accident and by intent."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 9)


def flip(file: Path) -> None:
    """Changes a bit in the middle."""
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)


def replace(file: Path) -> None:
    file.write_bytes(b"foreign" * 100)


def in_metadata(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Damage of a `.metadata` file."""

    def damage(file: Path) -> None:
        metadata: Metadata = pickle.loads(file.read_bytes())
        change(metadata)
        file.write_bytes(pickle.dumps(metadata))

    return damage


def harm_in_metadata(file: Path) -> None:
    in_metadata(lambda metadata: setattr(metadata, "planner_data", Hostile(file.parent / "executed")))(file)


def harm_in_entry(name: str) -> Callable[[Path], None]:
    """Lets a `.metadata` file say that an entry is at the end of its shard, and puts something hostile there."""

    def damage(file: Path) -> None:
        hostile = io.BytesIO()
        torch.save(Hostile(file.parent / "executed"), hostile)

        def move(metadata: Any) -> None:
            for index, info in metadata.storage_data.items():
                if index.fqn == name:
                    shard = file.with_name(info.relative_path)
                    info.offset, info.length = shard.stat().st_size, len(hostile.getvalue())
                    shard.write_bytes(shard.read_bytes() + hostile.getvalue())

        in_metadata(move)(file)

    return damage


def move_shards(metadata: Any) -> None:
    """Lets metadata refer to files of another folder."""
    for info in metadata.storage_data.values():
        info.relative_path = "../step-000001/" + info.relative_path
