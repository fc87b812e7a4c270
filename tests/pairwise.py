"""A few rows in which every two values of any two axes meet: most faults of combinations need no more than two."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Mapping

Row = dict[str, str]
"""By the name of an axis, the name of one of its values."""
Value = tuple[str, str]
"""The names of an axis, and of one of its values."""
Axes = Mapping[str, Collection[str]]
"""The names of each axis's values."""


def covering(axes: Axes, contradict: Collection[frozenset[Value]] = (), seldom: Collection[Value] = ()) -> list[Row]:
    """Rows in which every two values of two axes are together that may be, the same in each run.

    Args:
        axes: What is drawn.
        contradict: Two values that are in no row together.
        seldom: Values that are drawn where no other one does as much, since their rows take long.
    """
    drawn, missing, rare = random.Random(0), pairs(axes) - set(contradict), set(seldom)
    rows = []
    while missing:
        # Each candidate begins with a pair that is missing, and takes what meets most of the others, axis by axis.
        ordered = sorted(map(sorted, missing))
        candidates = [_grown(dict(drawn.choice(ordered)), axes, missing, contradict, rare, drawn) for _ in range(8)]
        rows.append(max(candidates, key=lambda row: (len(missing & pairs_of(row)), rare.isdisjoint(row.items()))))
        missing -= pairs_of(rows[-1])
    assert not any(pairs_of(row) & set(contradict) for row in rows)
    return rows


def pairs(axes: Axes) -> set[frozenset[Value]]:
    """Every two values of two axes."""
    values = [[(axis, value) for value in axes[axis]] for axis in axes]
    return {frozenset(pair) for a, b in itertools.combinations(values, 2) for pair in itertools.product(a, b)}


def pairs_of(row: Row) -> set[frozenset[Value]]:
    """Every two values of a row."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def with_defaults(axes: Axes, pair: Iterable[Value]) -> Row:
    """A row of the first value of each axis, but for a pair."""
    return {axis: next(iter(axes[axis])) for axis in axes} | dict(pair)


def _grown(
    row: Row,
    axes: Axes,
    missing: set[frozenset[Value]],
    contradict: Collection[frozenset[Value]],
    rare: Collection[Value],
    drawn: random.Random,
) -> Row:
    def gain(value: Value) -> tuple[int, bool]:
        met = [frozenset({value, one}) for one in row.items()]
        new = -1 if any(pair in contradict for pair in met) else sum(pair in missing for pair in met)
        return new, value not in rare

    for axis in drawn.sample(list(axes), len(axes)):
        if axis not in row:
            values = [(axis, value) for value in axes[axis]]
            row |= [max(drawn.sample(values, len(values)), key=gain)]
    return {axis: row[axis] for axis in axes}
