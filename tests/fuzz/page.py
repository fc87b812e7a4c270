"""The table of `docs/limits.md`: each row of the catalogue, here, with FSDP2, with plain `torch.compile`."""

from __future__ import annotations

import re
from pathlib import Path

from tests.fuzz.catalogue import ROWS
from tests.fuzz.run import Contender, run_programs
from tests.fuzz.verdict import Outcome, Verdict

_COLUMNS = (Contender.HERE, Contender.FSDP2, Contender.AOT)
PAGE = Path(__file__).parents[2] / "docs/limits.md"
BEGIN = "<!-- written by `python -m tests.fuzz --catalogue` -->\n"
END = "<!-- end -->\n"
_HEAD = "| program | here | FSDP2 | `torch.compile`, one process |\n|---|---|---|---|\n"


def read() -> dict[str, Verdict]:
    """What this package does to each program, as the page says."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()[2:]
    cells = (re.split(r"(?<!\\)\|", line) for line in table)
    return {says.strip(): Verdict(here.split(":")[0].strip(" *")) for _, says, here, *_ in cells}


def write() -> None:
    """Measures every row and writes the table: two minutes."""
    columns = [map(_cell, run_programs([row.text() for row in ROWS], contender)) for contender in _COLUMNS]
    lines = (" | ".join((row.says, *cells)) for row, *cells in zip(ROWS, *columns, strict=True))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table = _HEAD + "".join(f"| {line} |\n" for line in lines)
    PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2])


def _cell(outcome: Outcome) -> str:
    """The verdict, and the start of the line that explains it."""
    said = re.sub(r"differs by [^,]*, and .*", "differs", outcome.line)
    said = re.sub(r"BackendCompilerFailed: backend='fsdp' raised: |TorchRuntimeError: RuntimeError ", "", said)
    said = said.replace("|", r"\|").replace("<", "").replace(">", "")
    return f"{outcome.verdict}: {said[:90].strip()}" if said else str(outcome.verdict)
