"""What all benchmark commands share: arguments, the JSON that they write, the table that they print."""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.environment import environment

Columns = Mapping[str, Callable[[Any], str]]
"""How each field of a row is written."""
RESULTS = Path(__file__).parent / "results"


def parser(name: str, about: str) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.<name>`, with the arguments of every benchmark."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    made.add_argument("--smoke", action="store_true", help="tiny sizes: shows that it runs, and measures nothing")
    made.add_argument(
        "--out", type=Path, metavar="FILE", help=f"where the JSON goes (default: benchmarks/results/{name}.json)"
    )
    made.set_defaults(benchmark=name)
    return made


def finish(arguments: argparse.Namespace, settings: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> int:
    """Writes the JSON and says where.

    Returns:
        0, or 1 if nothing could be measured.
    """
    benchmark: str = arguments.benchmark
    smoke: bool = arguments.smoke
    path = arguments.out or RESULTS / f"{benchmark}{'.smoke' if smoke else ''}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "benchmark": benchmark,
        "smoke": smoke,
        "environment": environment(),
        "settings": dict(settings),
        "results": list(results),
    }
    path.write_text(json.dumps(_finite(document), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)
    return 0 if results and not all("error" in row for row in results) else 1


def _finite(value: Any) -> Any:
    """Plain data with numbers that JSON has not, such as the loss of a run that went wrong, as texts."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case Mapping():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
    return value


def table(title: str, rows: Sequence[Mapping[str, Any]], columns: Columns) -> None:
    """Prints rows; a column that a row lacks stays empty, and an error takes the last one's place.

    Args:
        title: Above the table.
        rows: Plain data.
        columns: How each field is written.
    """
    made = Table(title=title, title_justify="left")
    for name in columns:
        made.add_column(name, overflow="fold")
    for row in rows:
        cells = [write(row[name]) if row.get(name) is not None else "" for name, write in columns.items()]
        if row.get("error"):
            cells[-1] = row["error"]
        made.add_row(*cells)
    Console(highlight=False).print(made)


def ms(seconds: float) -> str:
    """Seconds as milliseconds."""
    return f"{seconds * 1e3:.1f} ms"


def percent(share: float) -> str:
    """A share."""
    return f"{share:z.1%}"


def mib(size_bytes: float) -> str:
    """Bytes as MiB."""
    return f"{size_bytes / 2**20:.1f} MiB"


def quiet() -> None:
    """Leaves out what torch says about itself; errors stay."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
