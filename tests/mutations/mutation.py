"""One deliberate fault of the package, and the test that must fail with it."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A replacement in one file that takes away what rows of `docs/coverage.md` promise."""

    rows: str  # ids of the rows, with spaces between them
    file: str  # below `fsdp_compile/`
    old: str  # text that the file has once
    new: str  # what takes its place
    test: str  # the test, which the rows name; with a parameter in brackets for one case of it

    @property
    def path(self) -> Path:
        """The file, relative to the root of the repository."""
        return Path("fsdp_compile") / self.file

    @property
    def function(self) -> str:
        """The test without its parameter, as rows name it."""
        return self.test.partition("[")[0]

    def applied(self, text: str) -> str:
        """The file's text with the fault."""
        return text.replace(self.old, self.new, 1)


def listed() -> list[Mutation]:
    """The mutations of `listed.toml`, in the order of their rows."""
    tables = tomllib.loads((Path(__file__).parent / "listed.toml").read_text())["mutation"]
    return [Mutation(**table) for table in tables]
