"""Runs PyTorch's own tests of FSDP2 on this package: `python -m tests.torch_fsdp2 FOLDER`.

FOLDER has the test files (`orig/`), what ports them to gloo on the CPU (`shim/`), and the names of those that pass
there with torch alone (`passes_with_torch.txt`). With torch's `fully_shard`, the outermost module
that it is called on is compiled. With `--uncompiled` nothing is compiled, and `fully_shard` is this package's. Tests
that may fail are listed in `expected_failures.txt` in this folder, each with its reason (one times its steps); the exit
status is 1 if others fail.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.torch_fsdp2.patched import GATHERED

EXPECTED = Path(__file__).with_name("expected_failures.txt")
SUBTESTS, TIMEOUT_S = "2", "300"
"""Combinations of arguments that are drawn of each test, and seconds for one test."""

Results = Mapping[str, Mapping[str, Any]]
"""What the runner has recorded of each test, by its name."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_fsdp2")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--uncompiled", action="store_true", help="compile nothing")
    parser.add_argument("-k", action="append", default=[], help="only tests with this in their name")
    given = parser.parse_args()
    kind = "uncompiled" if given.uncompiled else "compiled"
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / "tests"
        shutil.copytree(given.folder, work)
        subprocess.run([sys.executable, str(work / "shim" / "port.py")], check=True)
        results = _run(kind, work, given.k)
    found = {name: record for name, record in results.items() if record["status"] != "pass"}
    expected = {failure.name for failure in expected_failures() if failure.kind == kind}
    unexpected = sorted(found.keys() - expected)
    better = sorted(name for name in expected & results.keys() if name not in found)
    for name in unexpected:
        print(f"FAILED {name}: {found[name]['status']}: {found[name].get('error', '')}"[:400])
    for name in better:
        print(f"PASSED, though it is listed in {EXPECTED.name}: {name}")
    print(f"{len(results) - len(found)} of {len(results)} pass, {len(unexpected)} not as expected")
    if not given.uncompiled:
        gathered = sum(GATHERED in record.get("notes", ()) for record in results.values())
        print(f"{gathered} have run a compiled graph that gathers")
    return 1 if unexpected or not results else 0


def _run(kind: str, work: Path, chosen: list[str]) -> Results:
    out = work / "results.jsonl"
    files = sorted(path.name for path in (work / "orig").glob("test_*.py"))
    only = ["--only", str(work / "passes_with_torch.txt")]
    words = [word for each in chosen for word in ("-k", each)]
    command = [sys.executable, "-m", f"{__package__}.patched", kind, str(work), str(out), "--timeout", TIMEOUT_S, *only]
    environment = {**os.environ, "SHIM_MODE": "torch", "SHIM_SUBTEST_MAX": SUBTESTS}
    subprocess.run([*command, *words, *files], env=environment, check=True)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    return {each["id"]: each for each in records if each["status"] != "skip"}


class Failure(NamedTuple):
    """A test that may fail: compiled or uncompiled, its name, and the reason."""

    kind: str
    name: str
    reason: str


def expected_failures() -> list[Failure]:
    """The tests that may fail."""
    lines = [line for line in EXPECTED.read_text().splitlines() if line and not line.startswith("#")]
    return [Failure(*line.split(maxsplit=2)) for line in lines]


if __name__ == "__main__":
    sys.exit(main())
