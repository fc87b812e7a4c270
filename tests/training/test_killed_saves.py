"""Ranks that are ended by SIGKILL while they save: the last checkpoint that was saved is there, and is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.command import ROOT


@pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked, which takes no time")
@pytest.mark.parametrize("how", [(), ("--background",)], ids=["at once", "in the background"])
@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.long)])
def test_a_kill_at_any_point_of_a_save_loses_nothing(kills: int, how: tuple[str, ...], tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.training.killed_saves", str(tmp_path / "checkpoints")]
    done = subprocess.run(
        [*program, "--kills", str(kills), "--seed", str(kills), *how],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{kills} kills, ")
