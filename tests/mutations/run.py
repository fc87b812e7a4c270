"""Runs each test with its mutation, in a copy of the tree: a row is covered if the test fails there."""

from __future__ import annotations

import enum
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.mutations.mutation import ROOT, Mutation

_COPIED = ("fsdp_compile", "tests", "docs", "pyproject.toml")
_TIMEOUT_S = 240
_FAILED = 1  # pytest's code for tests that ran and failed


class Verdict(enum.Enum):
    """What a test says to a mutation."""

    CAUGHT = "caught"
    HUNG = "caught: did not end"
    MISSED = "MISSED"


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the repository that mutations may be applied to."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder)
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        yield copy


def judge(mutation: Mutation, tree: Path) -> Verdict:
    """Applies a mutation in `tree`, runs its test and undoes it."""
    path = tree / mutation.path
    text = path.read_text()
    path.write_text(mutation.applied(text))
    try:
        code = _pytest([mutation.test], tree)
    finally:
        path.write_text(text)
    if code is None:
        return Verdict.HUNG
    if code > _FAILED:
        raise RuntimeError(f"{mutation.test} could not be run: pytest ended with {code}")
    return Verdict.CAUGHT if code == _FAILED else Verdict.MISSED


def passes(tests: Sequence[str], tree: Path) -> bool:
    """Whether tests pass in a tree without a mutation, so that a failure is the mutation's."""
    return _pytest(tests, tree, timeout_s=_TIMEOUT_S * len(tests)) == 0


def _pytest(tests: Sequence[str], tree: Path, *, timeout_s: int = _TIMEOUT_S) -> int | None:
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "FSDP_COMPILE_LONG": "1"}
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # with its ranks, which would outlive it
    ) as process:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None
