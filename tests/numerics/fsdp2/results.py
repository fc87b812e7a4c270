"""The last tables of `docs/parity.md`: every combination that is compared, with the worst difference of each."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from filelock import FileLock

from fsdp_compile.parity.compare import Difference

Judge = Callable[[str, Iterable[str], str, Sequence[Difference]], None]
"""The fixture `judge`."""

PAGE = Path(__file__).parents[3] / "docs" / "parity.md"
_LOCK = Path(tempfile.gettempdir()) / "fsdp_compile-parity-results.lock"
_BEGIN = "<!-- written by `pytest tests/numerics/fsdp2 --update-parity-results` -->\n"
_END = "<!-- end -->\n"
_COLUMNS = "| combination | required | largest difference | last places | largest share of a bound | torch |"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the page."""

    key: str  # the combination
    cells: tuple[str, ...]  # what was measured, ready to print

    @staticmethod
    def of(key: str, found: Sequence[Difference]) -> Row:
        bitwise = all(one.bound == 0 for one in found)
        relative = max(one.relative for one in found)
        places = max(one.ulps for one in found)
        share = max((one.absolute / one.bound for one in found if one.bound), default=0.0)
        last = "" if bitwise else f"{share:.2g}"
        version = torch.__version__.split("+")[0]
        return Row(key, ("equal bits" if bitwise else "bounds", f"{relative:.2g}", f"{places:.3g}", last, version))

    def __str__(self) -> str:
        return f"| {' | '.join([self.key, *self.cells])} |"


def read() -> dict[str, list[Row]]:
    """Rows of the committed page by section."""
    sections: dict[str, list[Row]] = {}
    for line in PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0].splitlines():
        if line.startswith("### "):
            rows = sections.setdefault(line.removeprefix("### "), [])
        elif line.startswith("| ") and line != _COLUMNS:
            key, *cells = (cell.strip() for cell in line.strip("| ").split(" | "))
            rows.append(Row(key, tuple(cells)))
    return sections


def update(section: str, keys: Iterable[str], row: Row) -> None:
    """Puts one row into the page.

    Args:
        section: Its title.
        keys: Of all rows that the section has, in order: other rows leave the page.
        row: The new one, one of them.
    """
    with FileLock(_LOCK):  # other workers of the same run write other rows
        sections = read()
        known = {one.key: one for one in sections.get(section, [])} | {row.key: row}
        sections[section] = [known[key] for key in keys if key in known]
        before, _, rest = PAGE.read_text().partition(_BEGIN)
        PAGE.write_text(before + _BEGIN + _tables(sections) + _END + rest.partition(_END)[2])


def _tables(sections: Mapping[str, Iterable[Row]]) -> str:
    rule = "|---" * (_COLUMNS.count("|") - 1) + "|"
    tables = [
        "\n".join([f"### {title}", "", _COLUMNS, rule, *map(str, rows)]) for title, rows in sorted(sections.items())
    ]
    return "\n" + "\n\n".join(tables) + "\n"
