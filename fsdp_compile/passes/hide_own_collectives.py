"""Computes weight gradients while collectives of the program's own, as tensor parallelism's, are under way.

    compute w1, compute x1, all-reduce x1, wait, use x1   ->   compute x1, all-reduce x1, compute w1, wait, use x1

Backward computes the gradient of a layer's weight before that of its input, which is what the collective sends. Here
what no later collective needs is computed behind it, and waits stand where their results are first needed. Collectives
keep their order, this package's with what they wait for, and so do nodes that write, draw random numbers, or may do so
untold.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence

from torch import fx

from fsdp_compile.cost.communicate import is_own, own_communication, own_start_of
from fsdp_compile.cost.compute import node_costs
from fsdp_compile.cost.fusion import Fusion, plan_kernels
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.ir.calls import starts_of
from fsdp_compile.ir.graph import Phase, Stage, StepGraph
from fsdp_compile.ir.queries import has_effect, kept_order, with_sources
from fsdp_compile.passes.follow_order import NewOrder, Reorders, neighbours, sort_nodes

MARGIN = 2.0
"""As much is computed behind a collective as if it took this much longer than estimated; more only costs memory."""


@dataclasses.dataclass(frozen=True)
class HideOwnCollectives(Reorders):
    """The pass; see the module's docstring."""

    hardware: Hardware
    fusion: Fusion
    name = "hide-own-collectives"
    requires, ensures = Stage.BUCKETED, Stage.BUCKETED

    def plan(self, step: StepGraph) -> NewOrder:
        """Orders a backward graph anew; forward graphs have nothing that their collectives do not need."""
        starts = [node for node in step.graph.nodes if is_own(node)]
        if step.phase is not Phase.BACKWARD or not starts:
            return NewOrder(())
        costs = node_costs(step.graph, self.hardware, plan_kernels(step.graph, self.fusion))
        times_us = {node: costs[node].time_us for node in step.graph.nodes}
        most_us = MARGIN * max(own_communication(start, self.hardware).alone_us for start in starts)
        before = [node for node in step.graph.nodes if node.op not in ("placeholder", "output")]
        delayed = _delayed(before, with_sources(starts), times_us, most_us)
        kept = sort_nodes([*step.graph.find_nodes(op="placeholder"), *delayed], _kept(step))
        assert kept is not None  # the graph has such an order
        after = [node for node in kept if node.op != "placeholder"]
        return NewOrder(() if after == before else tuple(after))


def _delayed(
    nodes: Sequence[fx.Node], needed: Container[fx.Node], times_us: Mapping[fx.Node, float], most_us: float
) -> list[fx.Node]:
    """The nodes in an order in which up to `most_us` of what is not in `needed` is computed behind a collective."""
    order: list[fx.Node] = []
    delayed: deque[fx.Node] = deque()
    delayed_us = 0.0
    waiting: dict[fx.Node, None] = {}  # waits for collectives, and what reads them

    def flush() -> None:
        nonlocal delayed_us
        order.extend([*delayed, *waiting])  # first what needs no collective that is under way
        delayed.clear()
        waiting.clear()
        delayed_us = 0.0

    for node in nodes:
        waits = own_start_of(node) is not None
        reads = any(source in waiting for source in node.all_input_nodes)
        if (has_effect(node) and not is_own(node)) or (reads and node in needed and not waits):
            flush()
            order.append(node)
        elif waits or reads:
            waiting[node] = None
        elif node in needed:
            order.append(node)
        else:
            delayed.append(node)
            delayed_us += times_us[node]
            while delayed_us > most_us:
                delayed_us -= times_us[delayed[0]]
                order.append(delayed.popleft())
    flush()
    return order


def _kept(step: StepGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of nodes of which the first has to stay in front of the other.

    Collectives of this package start in the order of what they wait for, and their order is decided already.
    """
    order = step.order()
    pairs = neighbours(list(starts_of(step)), order)
    yield from ((first, later) for first, later in pairs if order[first] < order[later])
    yield from kept_order(step.graph)
