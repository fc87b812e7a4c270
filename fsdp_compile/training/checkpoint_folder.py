"""The folder of a run's checkpoints: which are complete, which the run wrote itself, which are removed.

checkpoints/step-000050                  complete: the file below says so, and the others are as it says
checkpoints/step-000050/complete.json    written last: the run, the step, the size and SHA-256 of every other file
checkpoints/.partial                     being written, or left over from a run that was interrupted while writing
checkpoints/.discarded-step-000040       being removed, or left over as well
checkpoints/step-000060.aside            damaged, or not the run's own, where the run wrote one of that name

Everything else in the folder is the user's, and stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum, auto
from pathlib import Path

from fsdp_compile.errors import CheckpointError
from fsdp_compile.formats.complete import MARKER, FileDigest, Marker, check_contents, check_size, read_marker

_NAME = re.compile(r"step-([0-9]{6}|[1-9][0-9]{6,})")  # as `finish` writes them: a copy may have more zeros
_DISCARDED = ".discarded-"


class Check(Enum):
    """How much of a checkpoint is compared with what was written."""

    SIZES = auto()  # takes no time
    CONTENTS = auto()  # reads everything


def step_of(checkpoint: Path | None) -> int:
    """The number of steps in a checkpoint's name; 0 where there is none, or it is another name."""
    match = _NAME.fullmatch(checkpoint.name) if checkpoint is not None else None
    return int(match[1]) if match else 0


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
        return self.path / ".partial"

    def candidates(self) -> list[Path]:
        """Folders that are named like checkpoints, most steps first."""
        found = []
        for path in self.path.glob("step-*"):
            with contextlib.suppress(OSError):  # it may not be seen
                if _NAME.fullmatch(path.name) and path.is_dir():
                    found.append(path)
        return sorted(found, key=step_of, reverse=True)

    def newest(self, check: Check = Check.SIZES) -> Path | None:
        """The checkpoint of the most steps that has no problem, if there is one."""
        return next((path for path in self.candidates() if self.problem_with(path, check) is None), None)

    def problem_with(self, checkpoint: Path, check: Check = Check.SIZES) -> str | None:
        """What is wrong with a checkpoint, None for nothing."""
        compare = check_size if check is Check.SIZES else check_contents
        try:
            for name, digest in self.read_marker(checkpoint).files.items():
                compare(checkpoint / name, digest)
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
        for path in self.path.glob(f"{_DISCARDED}step-*"):
            shutil.rmtree(path, ignore_errors=True)
        if self.partial.is_dir() and not self.partial.is_symlink():
            shutil.rmtree(self.partial)
        else:
            self.partial.unlink(missing_ok=True)
        self.partial.mkdir(parents=True)

    def finish(self, step: int, files: Mapping[str, FileDigest], *, keep: int) -> tuple[str, ...]:
        """Complete what was written, then remove older checkpoints of the run but the newest `keep` in all.

        Returns:
            Which of them cannot be removed and why, one sentence each.
        """
        marker = self.partial / MARKER
        try:
            with marker.open("w") as file:
                json.dump(asdict(Marker(self.run, step, files)), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(marker)) from None  # a failed write names no file
        _sync(self.partial)
        complete = self.path / f"step-{step:06d}"
        if self._is_own(complete):
            shutil.rmtree(_renamed(complete, f"{_DISCARDED}{complete.name}"), ignore_errors=True)
        elif os.path.lexists(complete):
            _renamed(complete, f"{complete.name}.aside")
        # A rename is atomic: all of the new folder is there, or nothing.
        self.partial.rename(complete)
        _sync(self.path)
        # Only now, so that there is a complete checkpoint at any time.
        return self._remove_older(step, keep)

    def abandon(self) -> None:
        """Remove what was written of a checkpoint that cannot be completed, so that a full disk has room."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def set_aside_after(self, step: int) -> None:
        """Rename the run's own checkpoints of later steps: they are damaged, or the run would go on from them."""
        for path in self.candidates():
            if step_of(path) > step and self._is_own(path):
                _renamed(path, f"{path.name}.aside")

    def _remove_older(self, step: int, keep: int) -> tuple[str, ...]:
        """Remove the run's own checkpoints of up to `step` steps that are older than the newest `keep` good ones."""
        problems = []
        good = 0
        for path in self.candidates():
            if step_of(path) > step or not self._is_own(path):
                continue
            if good == keep:
                try:
                    # Renamed first: at no time a checkpoint is there in part.
                    shutil.rmtree(_renamed(path, f"{_DISCARDED}{path.name}"))
                except OSError as error:  # the run can go on
                    problems.append(f"cannot remove {path}: {error.strerror}")
            elif self.problem_with(path) is None:
                good += 1
        return tuple(problems)

    def _is_own(self, checkpoint: Path) -> bool:
        """Whether the run wrote a checkpoint, and all that is in it."""
        try:
            known = {MARKER, *self.read_marker(checkpoint).files}
            return not checkpoint.is_symlink() and {path.name for path in checkpoint.iterdir()} <= known
        except (CheckpointError, OSError):
            return False


def _sync(folder: Path) -> None:
    """Wait until the names of a folder's files are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _renamed(path: Path, name: str) -> Path:
    """Rename a file or folder; where another has the name, a number is added."""
    number, free = 1, path.with_name(name)
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{name}-{number}")
    return path.rename(free)
