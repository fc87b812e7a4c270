"""`docs/awkward_programs.md`: what comes of each row of the catalogue, here, with FSDP2, with plain `torch.compile`."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from tests.fuzz.catalogue import ROWS
from tests.fuzz.row import Row
from tests.fuzz.run import Contender, run_programs
from tests.fuzz.verdict import Outcome, Verdict

_COLUMNS = (Contender.HERE, Contender.FSDP2, Contender.AOT)
_AT_ONCE = 8
PAGE = Path(__file__).parents[2] / "docs/awkward_programs.md"
_TOP = """# Awkward programs

What few programs do, and what comes of it: here (compiled with `lower="eager"`), with FSDP2 without compiling, and with
`torch.compile(backend="aot_eager")` in one process. The first two train on two ranks. All are compared with one process
that has the whole batch and compiles nothing, so the last column shows what is `torch.compile`'s own meaning.

- **equal**: losses, gradients and parameters are those of one process, up to rounding.
- **refused**: by an error that says what cannot be done, where, and what to write instead.
- **crashed**: by an error that does not. FSDP2's and torch's refusals are here too: they have no class of errors of
  their own.
- **wrong**: numbers differ without a word, or a parameter is not sharded. The first difference is shown.
- **hung**: ranks waited for each other.

`python -m tests.fuzz --catalogue` measures the programs, which `tests/fuzz/catalogue.py` has, and writes this page;
`tests/fuzz/test_catalogue.py` holds the package to its second column.

| program | here | FSDP2 | `torch.compile`, one process |
|---|---|---|---|
"""


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the table."""

    says: str
    here: str
    fsdp2: str
    compiled: str

    @property
    def expected(self) -> Verdict:
        """The verdict in the second column."""
        return Verdict(self.here.split(":")[0].strip("*"))

    @property
    def is_safe(self) -> bool:
        """Whether it ends soon: what hangs takes until its timeout, and new ranks."""
        return self.expected is not Verdict.HUNG


def read() -> dict[str, Line]:
    """The table by program."""
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    lines = [Line(*(cell.strip() for cell in row)) for row in cells[1:]]
    return {line.says: line for line in lines}


def write() -> None:
    """Measures every row and writes the page, a few rows at a time, so that it may be stopped: it takes two minutes."""
    lines = {line.says: " | ".join(dataclasses.astuple(line)) for line in read().values()}
    for first in range(0, len(ROWS), _AT_ONCE):
        rows = list(ROWS[first : first + _AT_ONCE])
        columns = [measured(rows, contender) for contender in _COLUMNS]
        lines |= {row.says: " | ".join((row.says, *cells)) for row, *cells in zip(rows, *columns, strict=True)}
        known = (lines[row.says] for row in ROWS if row.says in lines)
        PAGE.write_text(_TOP + "".join(f"| {line} |\n" for line in known))
        print(f"{first + len(rows)} of {len(ROWS)}", flush=True)


def measured(rows: list[Row], contender: Contender) -> list[str]:
    """The cells of one column."""
    return [_cell(outcome) for outcome in run_programs([row.text() for row in rows], contender)]


def _cell(outcome: Outcome) -> str:
    """The verdict, and the start of the line that explains it."""
    said = re.sub(r"differs by [^,]*, and .*", "differs", outcome.line)
    said = re.sub(r"BackendCompilerFailed: backend='fsdp' raised: |TorchRuntimeError: RuntimeError ", "", said)
    said = said.replace("|", r"\|").replace("<", "").replace(">", "")
    return f"{outcome.verdict}: {said[:90].strip()}" if said else str(outcome.verdict)
