"""`fsdp-compile bench`: runs a benchmark of the checkout that it is started in."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from fsdp_compile.errors import ConfigError

NAME = "bench"
ABOUT = "Run a benchmark; benchmarks are part of a checkout, not of the installed package."

_FOLDER = "benchmarks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the benchmark, and its arguments."""
    parser.add_argument("benchmark", nargs="?", metavar="NAME", help="such as step_time (default: list them)")
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="of the benchmark; bench NAME --help lists them"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs `python -m benchmarks.NAME ARGUMENTS` and returns its exit status.

    Raises:
        ConfigError: Outside a checkout, or for a benchmark that does not exist.
    """
    folder = Path.cwd() / _FOLDER
    if not (folder / "step_time.py").is_file():
        raise ConfigError(
            "there are no benchmarks here: they are not part of the installed package",
            where=str(Path.cwd()),
            instead="fsdp-compile bench in the root of a checkout of fsdp_compile",
        )
    name = arguments.benchmark
    if name is not None and not folder.joinpath(*name.split(".")).with_suffix(".py").is_file():
        raise ConfigError(f"there is no benchmark {name}", instead="fsdp-compile bench, which lists them")
    module = _FOLDER if name is None else f"{_FOLDER}.{name}"
    return subprocess.run([sys.executable, "-m", module, *arguments.rest], check=False).returncode
