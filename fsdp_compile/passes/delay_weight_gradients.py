"""Computes the last weight gradients during the last reduction, which nothing else could hide.

    compute w1, reduce w1, compute w0, reduce w0, wait all   ->   compute w0, reduce w0, compute w1, reduce w1, wait all

The gradient of what the model reads first, such as an embedding, is ready when backward has nothing left to compute.
Only its reduction needs a weight's gradient, so some of them can be computed later: as many as make the rest of the
step shorter, their own reductions included. Their inputs live longer. What reads memory that the program writes, such
as a scale that backward updates, keeps its place, and so does what draws random numbers, or may do so untold.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Container, Mapping, Sequence

from torch import fx

from fsdp_compile.cost.communicate import communication
from fsdp_compile.cost.compute import node_costs
from fsdp_compile.cost.fusion import Fusion, plan_kernels
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.ir.edit import move
from fsdp_compile.ir.graph import Role, Stage, StepGraph, role_of
from fsdp_compile.ir.queries import is_known_to_repeat, tied_to_writes
from fsdp_compile.passes.schedule_reduce import chains_of, followers_of

LEAST_GAIN = 0.25
"""Time that must be saved per time of computing that is delayed, since delaying costs memory and estimates err."""
MOST = 32
"""Reductions that are considered: more than a few units are never computed during the last one."""


@dataclasses.dataclass(frozen=True)
class Delayed:
    """A reduction that starts at `start`, with what is computed for its gradients alone, in graph order."""

    start: fx.Node
    made: tuple[fx.Node, ...]
    compute_us: float
    link_us: float


@dataclasses.dataclass(frozen=True)
class DelayPlan:
    """The reductions and all nodes that move to the end of the graph, in graph order."""

    delayed: tuple[Delayed, ...]
    moved: tuple[fx.Node, ...]
    tail_us: float  # estimated time from the end of computing to the end of the graph
    tail_before_us: float  # the same without the move


@dataclasses.dataclass(frozen=True)
class DelayWeightGradients:
    """The pass; see the module's docstring."""

    hardware: Hardware
    fusion: Fusion
    name = "delay-weight-gradients"
    requires, ensures = Stage.BUCKETED, Stage.BUCKETED

    def plan(self, step: StepGraph) -> DelayPlan:
        """Counts back from the last reduction to where delaying one more would not help."""
        chains = chains_of(followers_of(step))
        if len(chains) < 2:
            return DelayPlan((), (), 0.0, 0.0)
        order = step.order()
        tied = tied_to_writes(step.graph)
        latest_first = [(chain, _made_for(chain[0], order, tied)) for chain in reversed(chains[-MOST:])]
        made = {node for _, made in latest_first for node in made}
        costs = node_costs(step.graph, self.hardware, plan_kernels(step.graph, self.fusion), wanted=made)
        last, *others = (
            Delayed(
                chain[0],
                made,
                compute_us=sum(costs[node].time_us for node in made),
                link_us=sum(communication(start, self.hardware).alone_us for start in chain),
            )
            for chain, made in latest_first
        )
        # As many of the latest reductions as save most; the fewest of those that do.
        runs = [others[:count] for count in range(len(others) + 1)]
        lost_us = [_tail_us(run, last.link_us) + LEAST_GAIN * sum(one.compute_us for one in run) for run in runs]
        delayed = runs[lost_us.index(min(lost_us))]
        moved = {node for one in delayed for node in (*one.made, one.start)}
        for node in step.graph.nodes:  # and everything downstream
            if node.op == "call_function" and not moved.isdisjoint(node.all_input_nodes):
                moved.add(node)
        in_order = tuple(sorted(moved, key=order.__getitem__))
        return DelayPlan(tuple(delayed[::-1]), in_order, _tail_us(delayed, last.link_us), last.link_us)

    def apply(self, step: StepGraph, plan: DelayPlan) -> None:
        """Moves the nodes."""
        move(step.graph, [(plan.moved, step.output)])


def _made_for(start: fx.Node, order: Mapping[fx.Node, int], tied: Container[fx.Node]) -> tuple[fx.Node, ...]:
    """What is computed for a reduction alone, in graph order: nothing with other readers, random or in `tied`."""
    alone = {start}
    # Only inputs of nodes in `alone` can be alone; latest first, so that all users of a node are known before it.
    places = [-order[source] for source in start.all_input_nodes]
    found = {order[source]: source for source in start.all_input_nodes}
    heapq.heapify(places)
    while places:
        node = found[-heapq.heappop(places)]
        if node in tied or node.op != "call_function" or role_of(node) not in (None, Role.GRADIENT):
            continue
        if not is_known_to_repeat(node.target) or node.is_impure() or any(user not in alone for user in node.users):
            continue
        alone.add(node)
        for source in node.all_input_nodes:
            if order[source] not in found:
                found[order[source]] = source
                heapq.heappush(places, -order[source])
    return tuple(sorted(alone - {start}, key=order.__getitem__))


def _tail_us(delayed: Sequence[Delayed], last_us: float) -> float:
    """Time between the end of computing and the end of the link's work, if the link is free for the last reduction."""
    link_us, computed_us = last_us, 0.0
    for one in delayed[::-1]:
        computed_us += one.compute_us
        # It starts when its gradients are ready and the one before it is over.
        link_us = max(link_us, computed_us) + one.link_us
    return max(0.0, link_us - computed_us)
