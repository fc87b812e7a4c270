"""When collectives must start at the latest so that computing does not wait, from the end of a graph backwards."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from fsdp_compile.planner.problem import Gather, Problem


@dataclasses.dataclass(frozen=True)
class Latest:
    """For each gather, its latest start and that of its copy from the host, in time of computing without stalls."""

    gathers_us: Sequence[float]
    copies_us: Sequence[float]


def latest_starts(problem: Problem, margin: float) -> Latest:
    """The latest starts of all gathers of a graph, if times on the link and the bus are `margin` times longer."""
    gathers_us = _gathers_us(problem, margin)
    return Latest(gathers_us, _copies_us(problem, margin, gathers_us))


def _gathers_us(problem: Problem, margin: float) -> list[float]:
    """The latest start of each gather, in time of computing without stalls; negative if that is too late."""
    # Reductions that become ready between the needs of two gathers are served between them.
    ready = [reduction.ready for reduction in problem.reductions]
    latest: list[float] = []
    following: Gather | None = None
    for gather in reversed(problem.gathers):
        must_end = problem.reached_us[gather.need]
        if following is not None:
            served = slice(bisect.bisect_left(ready, gather.need), bisect.bisect_left(ready, following.need))
            between = sum(sum(r.stages_us) for r in problem.reductions[served])
            must_end = min(must_end, latest[-1] - between)
        latest.append(must_end - margin * gather.time_us)
        following = gather
    return latest[::-1]


def _copies_us(problem: Problem, margin: float, gathers_us: Sequence[float]) -> list[float]:
    """The same for the copies from the host: each is complete when its gather must start; the bus is shared."""
    latest: list[float] = []
    must_end = float("inf")
    for gather, gather_us in zip(reversed(problem.gathers), reversed(gathers_us), strict=True):
        must_end = min(must_end, gather_us) - margin * gather.copy_us
        latest.append(must_end)
    return latest[::-1]
