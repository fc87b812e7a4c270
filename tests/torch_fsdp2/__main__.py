"""Runs PyTorch's own tests of FSDP2 with models compiled for this backend: `python -m tests.torch_fsdp2 FOLDER`.

FOLDER has the test files (`orig/`), what ports them to gloo on the CPU (`shim/`), and the names of those that pass
there with torch alone (`passes_with_torch.txt`). torch's `fully_shard` stays; the outermost module that it is called on
is compiled. Tests that may fail are listed in `expected_failures.txt` in this folder, each with its reason; the exit
status is 1 if others fail, or if one of these passes.
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

EXPECTED = Path(__file__).with_name("expected_failures.txt")
SUBTESTS, TIMEOUT_S = "2", "90"
"""Combinations of arguments that are drawn of each test, and seconds for one test."""


def main() -> int:
    """Runs the tests, and prints what was not expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch_fsdp2")
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", action="append", default=[], help="only tests with this in their name")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / "tests"
        shutil.copytree(given.folder, work)
        subprocess.run([sys.executable, str(work / "shim" / "port.py")], check=True)
        results = _run(work, given.k)
    found = {name: status for name, status in results.items() if status != "pass"}
    expected = dict(_expected())
    unexpected = sorted(found.keys() - expected.keys())
    better = sorted(name for name in expected.keys() & results.keys() if name not in found)
    for name in unexpected:
        print(f"FAILED {name}: {found[name]}")
    for name in better:
        print(f"PASSED, though it is listed in {EXPECTED.name}: {name}")
    print(f"{len(results) - len(found)} passed, {len(unexpected) + len(better)} failed")
    return 1 if unexpected or better or not results else 0


def _run(work: Path, chosen: list[str]) -> Mapping[str, str]:
    """Status of each test by its name: "pass", or what went wrong."""
    out = work / "results.jsonl"
    files = sorted(path.name for path in (work / "orig").glob("test_*.py"))
    only = ["--only", str(work / "passes_with_torch.txt")]
    words = [word for each in chosen for word in ("-k", each)]
    command = [sys.executable, "-m", f"{__package__}.compiled", str(work), str(out), "--timeout", TIMEOUT_S, *only]
    environment = {**os.environ, "SHIM_MODE": "torch", "SHIM_SUBTEST_MAX": SUBTESTS}
    subprocess.run([*command, *words, *files], env=environment, check=True)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    return {
        each["id"]: each["status"] if each["status"] == "pass" else f"{each['status']}: {each.get('error', '')}"[:300]
        for each in records
        if each["status"] != "skip"
    }


def _expected() -> list[tuple[str, str]]:
    """Name and reason of each test that may fail."""
    lines = [line for line in EXPECTED.read_text().splitlines() if line and not line.startswith("#")]
    return [(name, reason) for name, _, reason in (line.partition(" ") for line in lines)]


if __name__ == "__main__":
    sys.exit(main())
