"""A run's folder is used by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_compile.errors import ConfigError
from fsdp_compile.training.run_lock import lock_run
from tests.training.command import ROOT

TRY = """
import sys
from pathlib import Path
from fsdp_compile.errors import ConfigError
from fsdp_compile.training.run_lock import lock_run

try:
    with lock_run(Path(sys.argv[1])):
        print("free")
except ConfigError as error:
    print(error)
"""


def _try(folder: Path) -> str:
    """What another process finds."""
    command = [sys.executable, "-c", TRY, str(folder)]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    ).stdout


def test_another_process_has_to_wait(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run"
    with lock_run(folder):
        assert _try(folder).startswith(f"another process trains in {folder}\n")
    assert _try(folder) == "free\n"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"(?s)cannot write in .*/file/run: Not a directory.*--out"),
        lock_run(tmp_path / "file" / "run"),
    ):
        pass


def test_file_systems_may_have_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", fail)
    with lock_run(tmp_path):
        pass
