"""Ranks that are ended by SIGKILL while they save: the last checkpoint that was saved is there, and is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import long
from tests.training.command import finish, session_of, start

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked, which takes no time")
PROGRAM = ("-m", "tests.training.killed_saves")


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.long)])
@long.parametrize("how", [(), ("--background",)], always=[("--background",)], ids=["at once", "in the background"])
def test_a_kill_at_any_point_of_a_save_loses_nothing(kills: int, how: tuple[str, ...], tmp_path: Path) -> None:
    program = (*PROGRAM, str(tmp_path / "checkpoints"), "--kills", str(kills), "--seed", str(kills), *how)
    process = start(tmp_path, *program)
    status, out, err = finish(process)
    assert status == 0, out + err
    assert out.startswith(f"{kills} kills, ")
    assert session_of(process) == []


@pytest.mark.long
def test_ranks_that_end_by_themselves_are_no_kills(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_bytes(b"a file, in which nothing can be saved")
    process = start(tmp_path, *PROGRAM, str(tmp_path / "checkpoints"), "--kills", "1")
    status, _, err = finish(process)
    assert status == 1
    assert f"CheckpointError: rank 0 cannot write {tmp_path}/checkpoints/.partial: Not a directory" in err
    assert "ended by itself: exit code 1" in err
    assert session_of(process) == []
