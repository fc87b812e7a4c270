"""The folder of a run's checkpoints: which are complete, which the run wrote itself, which are removed.

checkpoints/step-000050                  complete: the file below says so, and the others are as it says
checkpoints/step-000050/complete.json    written last: the run, the step, the size and SHA-256 of every other file
checkpoints/.partial                     being written, or left over from a run that was interrupted while writing
checkpoints/.discarded                   being removed, or left over as well
checkpoints/step-000060.aside            damaged, or not the run's own, where the run wrote one of that name

Everything else in the folder is the user's, and stays.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp_compile.errors import CheckpointError
from fsdp_compile.formats.complete import MARKER, FileDigest, Marker, check_size, read_marker

_NAME = re.compile(r"step-(\d{6,})")
_PARTIAL = ".partial"
_DISCARDED = ".discarded"


def step_of(checkpoint: Path) -> int | None:
    """The number of steps in a checkpoint's name, None where it is another name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of a run. All methods are called on one rank, unless they only read.

    Attributes:
        path: All hosts must see the same folder.
        run: What tells the run from others.
    """

    path: Path
    run: str

    @property
    def partial(self) -> Path:
        """Where a checkpoint is written."""
        return self.path / _PARTIAL

    def candidates(self) -> list[Path]:
        """Folders that are named like checkpoints, most steps first."""
        found = [path for path in self.path.glob("step-*") if step_of(path) is not None and path.is_dir()]
        return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)

    def newest(self) -> Path | None:
        """The checkpoint of the most steps that is complete as far as names and sizes tell, if there is one."""
        return next((path for path in self.candidates() if self.problem_with(path) is None), None)

    def problem_with(self, checkpoint: Path) -> str | None:
        """What is wrong with a checkpoint as far as names and sizes tell, None for nothing."""
        try:
            for name, digest in self.read_marker(checkpoint).files.items():
                check_size(checkpoint / name, digest)
        except CheckpointError as error:
            return error.what
        return None

    def read_marker(self, checkpoint: Path) -> Marker:
        """What `complete.json` says.

        Raises:
            CheckpointError: It is missing or damaged, or the checkpoint is another run's or was renamed.
        """
        marker = read_marker(checkpoint)
        if marker.run != self.run:
            raise CheckpointError(f"{checkpoint} is a checkpoint of another run")
        if marker.step != step_of(checkpoint):
            raise CheckpointError(f"{checkpoint} is a checkpoint of step {marker.step} under another name")
        return marker

    def begin(self) -> None:
        """Make an empty folder to write to."""
        shutil.rmtree(self.path / _DISCARDED, ignore_errors=True)
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def finish(self, step: int, files: Mapping[str, FileDigest], *, keep: int) -> None:
        """Complete what was written, then remove older checkpoints of the run but the newest `keep` in all."""
        _write(self.partial / MARKER, json.dumps(asdict(Marker(self.run, step, files)), indent=1))
        _sync(self.partial)
        complete = self.path / f"step-{step:06d}"
        if self._is_own(complete):
            self._discard(complete)
        elif os.path.lexists(complete):
            _set_aside(complete)
        # A rename is atomic: all of the new folder is there, or nothing.
        self.partial.rename(complete)
        _sync(self.path)
        # Only now, so that there is a complete checkpoint at any time.
        own = [path for path in self.candidates() if self._is_own(path) and (step_of(path) or 0) <= step]
        for path in own[keep:]:
            self._discard(path)

    def abandon(self) -> None:
        """Remove what was written of a checkpoint that cannot be completed, so that a full disk has room."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def set_aside_after(self, step: int) -> None:
        """Rename the run's own checkpoints of later steps: they are damaged, or the run would go on from them."""
        for path in self.candidates():
            if (step_of(path) or 0) > step and self._is_own(path):
                _set_aside(path)

    def _is_own(self, checkpoint: Path) -> bool:
        """Whether the run wrote a checkpoint, and all that is in it."""
        try:
            marker = self.read_marker(checkpoint)
        except CheckpointError:
            return False
        return not checkpoint.is_symlink() and {path.name for path in checkpoint.iterdir()} <= {MARKER, *marker.files}

    def _discard(self, checkpoint: Path) -> None:
        """Remove a checkpoint; at no time it is there in part."""
        aside = self.path / _DISCARDED
        checkpoint.rename(aside)
        shutil.rmtree(aside)


def _write(path: Path, text: str) -> None:
    try:
        with path.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # a failed write names no file


def _sync(folder: Path) -> None:
    """Wait until the names of a folder's files are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_aside(path: Path) -> None:
    """Give a file or folder a name that is free."""
    number, aside = 1, path.with_name(f"{path.name}.aside")
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{path.name}.aside-{number}")
    path.rename(aside)
