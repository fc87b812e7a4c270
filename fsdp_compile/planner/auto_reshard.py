"""Chooses which buckets stay unsharded from forward to backward, under the budgets of both graphs.

    forward  | ... gather k, use k -----------+          forward  | ... gather k, use k ----------- k is saved
    backward | gather k, use k, ...           |    ->    backward | use k, ...

Each saved byte spares the link as much as any other, so the bucket that is unused for the shortest time comes first:
the one that forward uses last and backward needs first. Of the numbers of buckets that fit, the smallest is taken that
brings the step as near to its least estimated time as any, on a link as estimated and on one that is `margin` times
slower.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from fsdp_compile.planner.list_schedule import place
from fsdp_compile.planner.problem import Problem, Saved
from fsdp_compile.planner.replay import replay

NEAR = 1.002
"""Times that differ by less than this count as the same: estimates are no better than that."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A bucket that both graphs gather, by its number among the gathers of each."""

    forward: int
    backward: int


@dataclasses.dataclass(frozen=True)
class Halves:
    """The problems of forward and backward."""

    forward: Problem
    backward: Problem

    def keeping(self, pairs: Sequence[Pair]) -> Halves:
        """The same step, if these buckets stay unsharded."""
        backward = _without(self.backward, [pair.backward for pair in pairs])
        numbers = [pair.forward for pair in pairs]
        gathers = tuple(
            dataclasses.replace(gather, kept=True) if index in numbers else gather
            for index, gather in enumerate(self.forward.gathers)
        )
        held = [(g.free, len(self.forward.steps_us), g.size_bytes) for i, g in enumerate(gathers) if i in numbers]
        least = _with(self.forward.least_bytes, held)
        return Halves(dataclasses.replace(self.forward, gathers=gathers, least_bytes=least), backward)


def _without(problem: Problem, numbers: Sequence[int]) -> Problem:
    """A graph that finds some of its buckets in memory, and does not gather them."""
    found = [problem.gathers[number] for number in numbers]
    left = tuple(gather for number, gather in enumerate(problem.gathers) if number not in numbers)
    waiting = [(0, gather.need, gather.size_bytes) for gather in found]
    saved = tuple(Saved(need=g.need, free=g.free, size_bytes=g.size_bytes) for g in found)
    return dataclasses.replace(problem, gathers=left, saved=saved, least_bytes=_with(problem.least_bytes, waiting))


def keep(step: Halves, pairs: Sequence[Pair], *, budget_bytes: int | None, margin: float) -> tuple[Pair, ...]:
    """The buckets that stay unsharded from forward to backward.

    Args:
        step: Both graphs, if all buckets are resharded.
        pairs: Buckets that may stay.
        budget_bytes: Most bytes of everything that may be live in either graph; `least_bytes` of both are known then.
            `None` for what a schedule without a budget may use.
        margin: How much slower than estimated the link may be.
    """
    forward, backward = step.forward, step.backward

    def held_us(pair: Pair) -> float:
        """How long a bucket would be in memory without being used."""
        after_us = forward.compute_us - forward.reached_us[forward.gathers[pair.forward].free]
        return after_us + backward.reached_us[backward.gathers[pair.backward].need]

    first = sorted(pairs, key=held_us)
    found: dict[int, tuple[float, ...]] = {}
    for count in _counts(len(first)):
        kept = step.keeping(first[:count])
        if count and not _fits(step, kept, budget_bytes):
            break
        found[count] = _times_us(kept, budget_bytes, margin)
    least_us = [min(column) for column in zip(*found.values(), strict=True)]

    def lost(count: int) -> float:
        return max(us / least if least else 1.0 for us, least in zip(found[count], least_us, strict=True))

    best = min(found, key=lambda count: (max(NEAR, lost(count)), count))
    return tuple(first[:best])


def _counts(most: int) -> Iterator[int]:
    """Numbers of buckets to try: every small one, then in steps of about a fifth, since each one costs a plan."""
    count = 0
    while count < most:
        yield count
        count += 1 + count // 5
    yield most


def _fits(step: Halves, kept: Halves, budget_bytes: int | None) -> bool:
    """Whether both graphs stay within their budgets."""
    for before, after in ((step.forward, kept.forward), (step.backward, kept.backward)):
        # Under a budget for everything, a schedule still needs room to prefetch one bucket and to reduce another.
        room = before.promised_bytes - max(before.in_use_bytes(), default=0)
        most = before.promised_bytes if budget_bytes is None else budget_bytes - room
        if max(after.least_live_bytes(), default=0) > most:
            return False
    return True


def _times_us(step: Halves, budget_bytes: int | None, margin: float) -> tuple[float, ...]:
    """Estimated time of both graphs, on the link as estimated and on a slower one."""
    plans = []
    for half in (step.forward, step.backward):
        # At least what the problem needs: the pass that plans the graph reports a budget that is too small.
        most = half.promised_bytes if budget_bytes is None else budget_bytes
        most = max(most, max(half.least_live_bytes(), default=0))
        plans.append((half, place(half, budget_bytes=most, margin=margin)))
    return tuple(
        sum(replay(half.slower(times), plan.issued, plan.waits) for half, plan in plans) for times in (1.0, margin)
    )


def _with(least_bytes: tuple[int, ...], held: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    if not least_bytes:
        return ()
    change = [0] * (len(least_bytes) + 1)
    for begin, end, size_bytes in held:
        change[min(begin, end)] += size_bytes
        change[end] -= size_bytes
    more = itertools.accumulate(change[:-1])
    return tuple(bytes_ + extra for bytes_, extra in zip(least_bytes, more, strict=True))
