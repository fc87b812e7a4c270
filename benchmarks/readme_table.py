"""README's table of measured numbers, out of the JSON files below `benchmarks/results/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.command import mib

README = Path(__file__).parents[1] / "README.md"
_BEGIN, _END = "<!-- measured: written by `python -m benchmarks.results_page` -->\n", "<!-- end -->\n"
_COLUMNS = {
    "fsdp2": "FSDP2",
    "fsdp2_compiled_blocks": "FSDP2, compiled blocks",
    "fsdp_compile": "`fsdp_compile`",
    "fsdp_compile_blocks": "`fsdp_compile`, blocks",
}
"""Names of contenders, and their columns; a column that nothing was measured of is left out."""
_FIRST_STEP = {
    "fsdp2_blocks_s": "fsdp2_compiled_blocks",
    "fsdp_compile_s": "fsdp_compile",
    "blocks_s": "fsdp_compile_blocks",
}
_LAYERS = 48


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The table with a line about where its numbers are from, as Markdown."""
    rows: dict[str, dict[str, str]] = {}
    for section in found["step_time"]["results"]:
        title = f"step, communication / compute = {section['communication_over_compute']:g}"
        measured = (row for row in section["contenders"] if "median_s" in row)
        rows[title] = {row["contender"]: f"{row['median_s']:.2f} s" for row in measured}
    (deep,) = (row for row in found["compile_time"]["results"] if row["layers"] == _LAYERS)
    rows[f"first step of {_LAYERS} layers, empty caches"] = {
        name: f"{deep[field]:.0f} s" for field, name in _FIRST_STEP.items() if field in deep
    }
    peaks = (row for row in found["memory"]["results"] if "peak_bytes" in row and not row.get("budget_bytes"))
    rows["peak memory of a step"] = {row["contender"]: mib(row["peak_bytes"]) for row in peaks}
    shown = [name for name in _COLUMNS if any(name in row for row in rows.values())]
    lines = [["", *(_COLUMNS[name] for name in shown)], ["---"] * (len(shown) + 1)]
    lines += [[title, *(row.get(name, "") for name in shown)] for title, row in rows.items()]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines) + "\n" + _about(found)


def _about(found: Mapping[str, Mapping[str, Any]]) -> str:
    told = {name: found[name]["environment"] for name in ("step_time", "compile_time", "memory")}
    ran = "; ".join(f"`{name}`: {each['processor']}, {each['time'][:10]}" for name, each in told.items())
    torches = ", ".join(dict.fromkeys(each["packages"]["torch"] for each in told.values()))
    return (
        "Llamas on an emulated network of 8 ranks. One CPU core computes. CPUs have no streams: there FSDP2 does not "
        "overlap.\n"
        f"(`python -m benchmarks.<name>` with torch {torches}; {ran}; [all results](docs/results.md).)\n"
    )


def replaced(text: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """README's text with the table of these results."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return before + _BEGIN + table(found) + _END + after
