"""Splits buckets as another rank has split them, which estimates times for other sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp_compile.ir.calls import line_of, names_in, numbered, operator_in, starts_of
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.passes.bucketing.messages import ParamCollective
from fsdp_compile.passes.bucketing.split_edges import Groups

Places = Mapping[tuple[str, str], int]


class OtherSplits:
    """How the graph of another rank is split.

    Args:
        step: The graph of this rank, with one collective for each parameter.
        lines: The collectives of the other one, as `ir.calls.numbered` writes them.
    """

    def __init__(self, step: StepGraph, lines: Sequence[str]) -> None:
        self._place: Places = {
            (_kind(line), name): number for number, line in enumerate(lines) for name in names_in(line)
        }
        starts = list(starts_of(step))
        own = numbered([line_of(start) for start in starts])
        self._key = {start: (_kind(line), names_in(line)[0]) for start, line in zip(starts, own, strict=True)}

    def split(self, groups: Groups) -> Groups:
        """Splits groups where the other rank sends several messages."""
        done: Groups = []
        for group in groups:
            parts: dict[int | None, list[ParamCollective]] = {}
            for single in group:
                parts.setdefault(self._place.get(self._key[single.start]), []).append(single)
            done += parts.values()
        return done


def _kind(line: str) -> str:
    return operator_in(line).removesuffix("_coalesced")
