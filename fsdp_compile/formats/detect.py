"""Which format a file or folder has, by what is in it."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from fsdp_compile.errors import CheckpointError
from fsdp_compile.formats.causes import naming
from fsdp_compile.formats.complete import size_of
from fsdp_compile.formats.dcp import DcpFolder
from fsdp_compile.formats.dcp_metadata import METADATA
from fsdp_compile.formats.entries import Checkpoint
from fsdp_compile.formats.options import SUFFIX, check_exists
from fsdp_compile.formats.safetensors_files import INDEX, SafetensorsFiles
from fsdp_compile.formats.torch_file import TorchFile

_STEP = re.compile(r"step-[0-9]+")
_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80\x02"
_LONGEST_HEADER = 100_000_000
"""Of safetensors, in bytes."""
_KINDS = "a folder of torch.distributed.checkpoint, a file of torch.save, a file of safetensors or a folder of them"


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Read what describes the values of a checkpoint. Nothing in it is executed.

    Args:
        path: A folder of torch.distributed.checkpoint (`fsdp-compile train`, FSDP2, FSDP1 and DDP write them), a file
            of `torch.save`, a file of safetensors, or a folder of them.

    Raises:
        ConfigError: There is no such path, or the package safetensors is missing.
        CheckpointError: It is no checkpoint, or not what was written, or says too little to be read by others.
    """
    path = Path(path)
    check_exists(path)
    with naming("read", path):
        return _open_folder(path) if path.is_dir() else _open_file(path)


def step_folders(path: Path) -> list[Path]:
    """The steps in the folder of a run of `fsdp-compile train`, or of its checkpoints; for any other path, the path."""
    if not path.is_dir() or (path / METADATA).exists():
        return [path]
    steps = [
        each for each in (*path.iterdir(), *path.glob("checkpoints/*")) if _STEP.fullmatch(each.name) and each.is_dir()
    ]
    return sorted(steps, key=lambda step: int(step.name.removeprefix("step-"))) or [path]


def _open_folder(path: Path) -> Checkpoint:
    if (path / METADATA).exists():
        return DcpFolder(path)
    if (path / f"__0{METADATA}").exists():
        raise CheckpointError(
            f"{path} has metadata of each rank, and none of all",
            instead="load it on as many ranks as wrote it, and save it with use_collectives=True",
        )
    if (path / INDEX).exists() or any(file.suffix == SUFFIX for file in path.iterdir()):
        return SafetensorsFiles(path)
    raise CheckpointError(f"{path} has neither {METADATA} nor {INDEX} nor a file of safetensors", instead=_KINDS)


def _open_file(path: Path) -> Checkpoint:
    size_of(path)
    with path.open("rb") as file:
        start = file.read(9)
    if start.startswith(_ZIP):
        return TorchFile(path)
    if start.startswith(_PICKLE):
        raise CheckpointError(
            f"{path} is a pickle, or a file of torch.save before torch 1.6",
            instead="torch.save(torch.load(file, weights_only=True), another)",
        )
    if len(start) == 9 and struct.unpack("<Q", start[:8])[0] <= _LONGEST_HEADER and start[8:] == b"{":
        return SafetensorsFiles(path)
    begins = f"begins with {start!r}" if start else "is empty"
    raise CheckpointError(f"{path} is no checkpoint: it {begins}", instead=_KINDS)
