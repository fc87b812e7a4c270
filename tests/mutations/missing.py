"""Rows of `docs/coverage.md` that promise a behaviour, and that no mutation takes away."""

from __future__ import annotations

from tests.mutations.mutation import listed
from tests.test_coverage import Row, rows


def without_mutation() -> list[Row]:
    """The rows that are covered by a test that `listed.toml` does not try, in their order."""
    tried = {row for mutation in listed() for row in mutation.rows.split()}
    return [row for row in rows() if row.status == "covered" and row.id not in tried]
