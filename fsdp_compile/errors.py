"""The exception tree: what was wrong, where, and what to write instead."""

from __future__ import annotations

from typing import Any


class FSDPCompileError(RuntimeError):
    """Base of every error that this package raises on purpose.

    Args:
        what: One sentence that says what was wrong.
        where: The module path, option, graph node or source line concerned.
        instead: What to write or do instead.
    """

    def __init__(self, what: str, *, where: str | None = None, instead: str | None = None) -> None:
        self.what = what
        self.where = where
        self.instead = instead
        lines = [what]
        if where is not None:
            lines.append(f"  where: {where}")
        if instead is not None:
            lines.append(f"  instead: {instead}")
        super().__init__("\n".join(lines))


class ConfigError(FSDPCompileError):
    """The user asked for something that is contradictory, unknown or impossible here."""


class BudgetTooSmallError(ConfigError):
    """No schedule of a graph keeps within `memory_budget_gb`.

    Attributes:
        least_bytes: The smallest budget that is enough, for the forward and backward graph concerned.
    """

    least_bytes: int = 0


class UnsupportedModelError(FSDPCompileError):
    """The model does something that this package refuses to compute wrongly."""


class InvariantError(FSDPCompileError):
    """A transformed graph breaks one of the package's own rules: a bug of ours."""


class ParityError(FSDPCompileError):
    """Compiled and reference training differ by more than the stated bound; `report` is the `ParityReport`."""

    report: Any = None


class PoisonError(FSDPCompileError):
    """A message of a collective has NaN while `options={"poison": True}` fills freed memory with it."""


class CheckpointError(FSDPCompileError):
    """A checkpoint cannot be written, or is not what was written."""


class RankMismatchError(FSDPCompileError):
    """Ranks disagree on something that all of them must agree on."""


class RankFailedError(FSDPCompileError):
    """A rank failed, or does not answer; where a launcher of ours started it, the text has that rank's traceback."""
