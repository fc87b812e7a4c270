"""The folder of a run's checkpoints: which are complete, which the run wrote itself, which are removed.

checkpoints/step-000050                  complete: the file below says so, and the others are as it says
checkpoints/step-000050/complete.json    written last: the run, the step, the size and SHA-256 of every other file
checkpoints/.partial                     being written, or left over from a run that was interrupted while writing
checkpoints/.discarded-step-000040       being removed, or left over as well
checkpoints/step-000060.aside            damaged, or not the run's own, where the run wrote one of that name

Everything else in the folder is the user's, and stays.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp_compile.errors import CheckpointError
from fsdp_compile.formats.files import MARKER, FileDigest, Marker, check_size, read_marker, sync

_NAME = re.compile(r"step-([0-9]{6}|[1-9][0-9]{6,})")  # as `finish` writes them: a copy may have more zeros
_DISCARDED = ".discarded-"


def step_of(checkpoint: Path | None) -> int:
    """The number of steps in a checkpoint's name; 0 where there is none, or it is another name."""
    match = _NAME.fullmatch(checkpoint.name) if checkpoint is not None else None
    return int(match[1]) if match else 0


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of a run, in a folder that all hosts see. Methods that write are called on one rank."""

    path: Path
    run: str

    @property
    def partial(self) -> Path:
        """Where a checkpoint is written."""
        return self.path / ".partial"

    def candidates(self) -> list[Path]:
        """Folders that are named like checkpoints, most steps first."""
        found = [path for path in self.path.glob("step-*") if _NAME.fullmatch(path.name)]
        # Unlike `Path.is_dir`, it is false of a link into a folder that this user may not see.
        return sorted(filter(os.path.isdir, found), key=step_of, reverse=True)

    def newest(self, check: Callable[[Path, FileDigest], None] = check_size) -> Path | None:
        """The checkpoint of the most steps that has no problem, if there is one."""
        return next((path for path in self.candidates() if self.problem_with(path, check) is None), None)

    def problem_with(self, checkpoint: Path, check: Callable[[Path, FileDigest], None] = check_size) -> str | None:
        """What is wrong with a checkpoint, None for nothing; `check_contents` reads all of it."""
        try:
            for name, digest in self.read_marker(checkpoint).files.items():
                check(checkpoint / name, digest)
        except CheckpointError as error:
            return error.what
        return None

    def read_marker(self, checkpoint: Path) -> Marker:
        """What `complete.json` says; `CheckpointError` if it is damaged, or the checkpoint another run's or renamed."""
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
        """Complete what was written, then remove older checkpoints of the run but the newest `keep` good ones in all.

        Returns:
            Which of them cannot be removed and why, one sentence each.
        """
        marker = self.partial / MARKER
        try:
            marker.write_text(json.dumps(asdict(Marker(self.run, step, files)), indent=1))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(marker)) from None  # a failed write names no file
        sync(marker)
        sync(self.partial)
        complete = self.path / f"step-{step:06d}"
        if self._is_own(complete):
            shutil.rmtree(_renamed(complete, f"{_DISCARDED}{complete.name}"), ignore_errors=True)
        elif os.path.lexists(complete):
            _renamed(complete, f"{complete.name}.aside")
        # A rename is atomic: all of the new folder is there, or nothing.
        self.partial.rename(complete)
        sync(self.path)
        # Only now, so that there is a complete checkpoint at any time.
        problems, good = [], 0
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

    def abandon(self) -> None:
        """Remove what was written of a checkpoint that cannot be completed."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def set_aside_after(self, step: int) -> None:
        """Rename the run's own checkpoints of later steps: they are damaged, or the run would go on from them."""
        for path in self.candidates():
            if step_of(path) > step and self._is_own(path):
                _renamed(path, f"{path.name}.aside")

    def _is_own(self, checkpoint: Path) -> bool:
        """Whether the run wrote a checkpoint, and all that is in it."""
        try:
            known = {MARKER, *self.read_marker(checkpoint).files}
            return not checkpoint.is_symlink() and {path.name for path in checkpoint.iterdir()} <= known
        except (CheckpointError, OSError):
            return False


def _renamed(path: Path, name: str) -> Path:
    """Rename a file or folder; where another has the name, a number is added."""
    number, free = 1, path.with_name(name)
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{name}-{number}")
    return path.rename(free)
