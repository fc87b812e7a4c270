"""The peak of a graph's memory as an expression: the largest of the sums that can be the largest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sympy

from fsdp_compile.cost.memory import Buffer, Holder, Memory
from fsdp_compile.cost.sizes import Sizes

Sum = Counter[Any]
"""A sum as coefficients by what they multiply, such as `batch*sequence`; nothing in it is ever negative."""


def live_sums(memory: Memory, sizes: Sizes, holders: Iterable[Holder] = Holder) -> Iterator[Sum]:
    """The sum of live bytes of `holders` while each node runs."""
    wanted = frozenset(holders)
    counted = [buffer for buffer in memory.buffers if buffer.holder in wanted and buffer.size_bytes]
    born = _by_place((buffer.first, buffer) for buffer in counted)
    gone = _by_place((buffer.last + 1, buffer) for buffer in counted)
    live: Sum = Counter()
    for position in range(memory.length):
        for buffer in gone.get(position, ()):
            live.subtract(_terms(buffer, sizes))
        for buffer in born.get(position, ()):
            live.update(_terms(buffer, sizes))
        yield +live if position in born else live


def largest(sums: Iterable[Sum]) -> sympy.Expr:
    """The largest of some sums; a sum that another one exceeds in every term is left out."""
    kept: list[Sum] = []
    for one in sums:
        if not any(_covers(other, one) for other in kept):
            kept = [other for other in kept if not _covers(one, other)] + [Counter(one)]
    added = [added_up(one) for one in kept]
    return sympy.Max(*added, evaluate=False) if len(added) > 1 else sympy.Add(*added)


def added_up(terms: Sum) -> sympy.Expr:
    """A sum as one expression."""
    return sympy.Add(*(coefficient * term for term, coefficient in terms.items()))


def _terms(buffer: Buffer, sizes: Sizes) -> Sum:
    return Counter(sympy.sympify(sizes.pieces(buffer.node)[buffer.result]).as_coefficients_dict())


def _covers(one: Sum, other: Sum) -> bool:
    return all(one[term] >= coefficient for term, coefficient in other.items())


def _by_place(buffers: Iterable[tuple[int, Buffer]]) -> dict[int, Sequence[Buffer]]:
    found: dict[int, list[Buffer]] = {}
    for place, buffer in buffers:
        found.setdefault(place, []).append(buffer)
    return found  # type: ignore[return-value]
