"""Splits buckets as another rank has split them, which estimates times for other sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fsdp_compile.ir.calls import line_of, names_in, numbered, operator_in, starts_of
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.passes.bucketing.messages import ParamCollective
from fsdp_compile.passes.bucketing.split_edges import Groups

Key = tuple[str, str, int]
"""Operator, parameter, and which one of that name: two models in one graph may have the same names."""


class OtherSplits:
    """How the graph of another rank is split.

    Args:
        step: The graph of this rank, with one collective for each parameter.
        lines: The collectives of the other one, as `ir.calls.numbered` writes them.
    """

    def __init__(self, step: StepGraph, lines: Sequence[str]) -> None:
        self._place = {key: number for number, keys in enumerate(_keys(lines)) for key in keys}
        starts = list(starts_of(step))
        own = numbered([line_of(start) for start in starts])
        self._key = {start: keys[0] for start, keys in zip(starts, _keys(own), strict=True)}

    def split(self, groups: Groups) -> Groups:
        """Splits groups where the other rank sends several messages."""
        done: Groups = []
        for group in groups:
            parts: dict[int | None, list[ParamCollective]] = {}
            for single in group:
                parts.setdefault(self._place.get(self._key[single.start]), []).append(single)
            done += parts.values()
        return done


def _keys(lines: Iterable[str]) -> Iterator[list[Key]]:
    """The keys of the parameters in each line."""
    seen: Counter[tuple[str, str]] = Counter()
    for line in lines:
        operator = operator_in(line).removesuffix("_coalesced")
        keys = []
        for name in names_in(line):
            seen[operator, name] += 1  # one by one: a message may have two parameters of one name
            keys.append((operator, name, seen[operator, name]))
        yield keys
