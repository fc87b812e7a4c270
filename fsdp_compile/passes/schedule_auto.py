"""Starts gathers and waits for reductions where the planner says, under a budget of bytes.

    wait 0, compute 0, gather 1, wait 1, compute 1   ->   wait 0, part of compute 0, gather 1, the rest, wait 1

By the cost model, a gather starts as late as it can and still be complete in time, so that it takes memory no longer
than it hides time; gradients are on the link until their reduction has completed, or until the budget needs their
memory. See `planner/list_schedule.py` for the algorithm.
"""

from __future__ import annotations

import dataclasses
import itertools

from torch import fx

from fsdp_compile.cost.fusion import Fusion
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.hardware import hardware as named_hardware
from fsdp_compile.errors import BudgetTooSmallError
from fsdp_compile.ir.edit import move
from fsdp_compile.ir.graph import SENT, Role, Stage, StepGraph, require
from fsdp_compile.ir.queries import upstream
from fsdp_compile.passes.schedule_prefetch import Move, copies_to, lone_copies, with_what_is_sent
from fsdp_compile.passes.schedule_reduce import Await, Followers, chains_of, copies_apart, followers_of, lone_waits
from fsdp_compile.planner.from_graph import Posed, count_everything, pose
from fsdp_compile.planner.list_schedule import BudgetError, Placement, place
from fsdp_compile.planner.problem import What, for_graphs, of_graphs

MARGIN = 4.0
"""Gathers start as early, and reductions are waited for as late, as if the link took this much longer than estimated.

Estimates of time err: the ratio of compute to communication that a job meets is rarely the one on the data sheets.
"""


@dataclasses.dataclass(frozen=True)
class SchedulePlan:
    """Moves, and their expected effect."""

    hoists: tuple[Move, ...]  # gathers, and copies from the host, in the order in which they start
    awaits: tuple[Await, ...]  # stages of reductions in the order in which they are waited for
    budget_bytes: int  # most bytes that may be live at any node; `peak_bytes` are
    peak_bytes: int
    end_us: float


@dataclasses.dataclass(frozen=True)
class ScheduleAuto:
    """The pass; see the module's docstring.

    Attributes:
        hardware: What times are estimated for.
        budget_bytes: Most bytes of a step at any time, of which the graph gets nearly all (`of_graphs`). By default
            gathered parameters and full gradients get what is in use at once, one more gathered unit and one more
            unit of gradients.
        fusion: How the graph will be run, which decides which values are ever in memory.
    """

    hardware: Hardware = dataclasses.field(default_factory=named_hardware)
    budget_bytes: int | None = None
    fusion: Fusion = Fusion.KERNELS
    name = "schedule-auto"
    requires, ensures = Stage.BUCKETED, Stage.BUCKETED

    def plan(self, step: StepGraph) -> SchedulePlan:
        """Makes a problem of the graph, plans it, and says where each node goes.

        Raises:
            BudgetTooSmallError: If no plan keeps within the budget.
        """
        followers = followers_of(step)
        moved = {node for following in followers.values() for node in following}
        moved.update(node for gather in step.nodes(Role.GATHER) for node in upstream(gather, *SENT))
        posed = pose(step, chains_of(followers), frozenset(moved), self.hardware, self.fusion)
        if self.budget_bytes is None:
            budget = max(posed.problem.promised_bytes, max(posed.problem.least_live_bytes(), default=0))
        else:
            posed, budget = count_everything(step, posed, self.fusion), of_graphs(self.budget_bytes)
        try:
            placement = place(posed.problem, budget_bytes=budget, margin=MARGIN)
        except BudgetError as error:
            raise _too_small(step, posed, error, self.budget_bytes or budget) from error
        return SchedulePlan(
            _hoists(step, posed, placement),
            _awaits(step, posed, placement, followers),
            budget,
            placement.peak_bytes,
            placement.end_us,
        )

    def apply(self, step: StepGraph, plan: SchedulePlan) -> None:
        """Moves the nodes."""
        waits = ((one.followers, one.anchor) for one in plan.awaits)
        move(step.graph, itertools.chain(waits, with_what_is_sent(plan.hoists)))


def _too_small(step: StepGraph, posed: Posed, error: BudgetError, budget: int) -> BudgetTooSmallError:
    node = posed.steps[error.step]
    problem = posed.problem
    units = [
        require(n).unit for n, g in zip(posed.gathers, problem.gathers, strict=True) if g.need <= error.step < g.free
    ]
    held = f", with {', '.join(dict.fromkeys(units))} gathered" if units else ""
    least_bytes = for_graphs(error.least_bytes)
    # Rounded up to three digits, so that a budget copied from the message is accepted.
    unit = 10 ** max(len(str(least_bytes)) - 3, 0)
    enough_bytes = -(-least_bytes // unit) * unit
    raised = BudgetTooSmallError(
        f"{budget / 1e9:g} GB do not hold what %{node} of the {step.phase.value} graph needs at once{held}",
        where="options={'memory_budget_gb': ...}",
        instead=f"at least {enough_bytes / 1e9:g}, or smaller units or batches",
    )
    raised.least_bytes = least_bytes
    return raised


def _anchor(step: StepGraph, posed: Posed, position: int) -> fx.Node:
    return posed.steps[position] if position < len(posed.steps) else step.output


def _hoists(step: StepGraph, posed: Posed, placement: Placement) -> tuple[Move, ...]:
    first_reduce = _first_starts(posed)
    behind = _behind_reductions(posed, placement)

    def anchor(at: int) -> fx.Node:
        return first_reduce[at] if at in first_reduce and at not in behind else _anchor(step, posed, at)

    found: list[Move] = []
    for start in placement.issued:
        gather, at = posed.gathers[start.gather], anchor(start.position)
        found += [Move(node, at) for node in (copies_to(gather) if start.what is What.COPY else [gather])]
    return (*found, *lone_copies(step))


def _behind_reductions(posed: Posed, placement: Placement) -> set[int]:
    """Positions at which all stands still for reductions and a gather: under a budget, gradients are freed in between.

    It takes no longer, since the link sends one after the other.
    """
    if not posed.problem.least_bytes:
        return set()
    pairs = zip(posed.problem.reductions, placement.waits, strict=True)
    running = {reduction.ready for reduction, waits in pairs if waits[-1] > reduction.ready}
    gathers = zip(posed.problem.gathers, placement.starts, strict=True)
    return {start for gather, start in gathers if gather.need == start} - running


def _awaits(step: StepGraph, posed: Posed, placement: Placement, followers: Followers) -> tuple[Await, ...]:
    first_reduce = _first_starts(posed)
    found: list[Await] = []
    copying: list[Await] = []  # waits for copies to the host, which go before the waits of the next position
    reached = -1
    for index, stage in placement.order:
        start, at = posed.reductions[index][stage], placement.waits[index][stage]
        anchor = _anchor(step, posed, at)
        if at > posed.problem.reductions[index].ready:
            anchor = first_reduce.get(at) or anchor
        if at > reached:
            found += [dataclasses.replace(one, anchor=anchor) for one in copying]
            copying, reached = [], at
        behind, last = copies_apart(followers[start])
        found.append(Await(start, behind, anchor))
        copying += [Await(start, last, step.output)] if last else []
    return (*found, *copying, *lone_waits(step, followers))


def _first_starts(posed: Posed) -> dict[int, fx.Node]:
    """For each position at which reductions start, the first of them."""
    found: dict[int, fx.Node] = {}
    for chain, reduction in zip(posed.reductions, posed.problem.reductions, strict=True):
        found.setdefault(reduction.ready, chain[0])
    return found
