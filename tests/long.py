"""Parametrized tests of which the default run has a few cases: the others are `long`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def parametrize(
    names: str | tuple[str, ...], values: Iterable[Any], *, always: Collection[Any], **others: Any
) -> pytest.MarkDecorator:
    """As `pytest.mark.parametrize`; what is not in `always` is marked `long`.

    Args:
        names: Of the arguments.
        values: Of the arguments: tuples, where there are several.
        always: Values that every run has: the most general ones, which fail with most of what the others fail with.
        others: More arguments of `pytest.mark.parametrize`.
    """
    values = list(values)
    assert all(value in values for value in always), f"{always} are not all among {values}"
    marked = [value if value in always else _long(names, value) for value in values]
    return pytest.mark.parametrize(names, marked, **others)


def _long(names: str | tuple[str, ...], value: Any) -> Any:
    arguments = (value,) if isinstance(names, str) else value
    return pytest.param(*arguments, marks=pytest.mark.long)
