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
from collections.abc import Iterator, Mapping

from torch import fx

from fsdp_compile.cost.communicate import is_own, own_communication, own_start_of
from fsdp_compile.cost.compute import node_costs
from fsdp_compile.cost.fusion import Fusion, plan_kernels
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.hardware import hardware as named_hardware
from fsdp_compile.ir.calls import starts_of
from fsdp_compile.ir.edit import move
from fsdp_compile.ir.graph import Phase, Stage, StepGraph
from fsdp_compile.ir.queries import has_effect, kept_order
from fsdp_compile.passes.sort_nodes import neighbours, sort_nodes

MARGIN = 2.0
"""As much is computed behind a collective as if it took this much longer than estimated; more only costs memory."""


@dataclasses.dataclass(frozen=True)
class HidePlan:
    """All nodes between the inputs and the output, in their new order; none if nothing changes."""

    order: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class HideOwnCollectives:
    """The pass; see the module's docstring."""

    hardware: Hardware = dataclasses.field(default_factory=named_hardware)
    fusion: Fusion = Fusion.KERNELS
    name = "hide-own-collectives"
    stage = Stage.BUCKETED

    def plan(self, step: StepGraph) -> HidePlan:
        """Orders a backward graph anew; forward graphs have nothing that their collectives do not need."""
        starts = [node for node in step.graph.nodes if is_own(node)]
        if step.phase is not Phase.BACKWARD or not starts:
            return HidePlan(())
        costs = node_costs(step.graph, self.hardware, plan_kernels(step.graph, self.fusion))
        times_us = {node: costs[node].time_us for node in step.graph.nodes}
        most_us = MARGIN * max(own_communication(start, self.hardware).alone_us for start in starts)
        found = _Order(_needed_by(starts), times_us, most_us)
        before = [node for node in step.graph.nodes if node.op not in ("placeholder", "output")]
        for node in before:
            found.add(node)
        found.flush()
        kept = sort_nodes([*step.graph.find_nodes(op="placeholder"), *found.nodes], _kept(step))
        assert kept is not None  # the graph has such an order
        after = [node for node in kept if node.op != "placeholder"]
        return HidePlan(() if after == before else tuple(after))

    def apply(self, step: StepGraph, plan: HidePlan) -> None:
        """Moves the nodes."""
        move(step.graph, [(plan.order, step.output)])


class _Order:
    """An order in the making.

    Attributes:
        nodes: Those that have their place.
    """

    def __init__(self, needed: frozenset[fx.Node], times_us: Mapping[fx.Node, float], most_us: float) -> None:
        self.nodes: list[fx.Node] = []
        self._needed = needed
        self._times_us = times_us
        self._most_us = most_us
        self._delayed: deque[fx.Node] = deque()
        self._delayed_us = 0.0
        self._waiting: dict[fx.Node, None] = {}  # waits for collectives, and what reads them

    def add(self, node: fx.Node) -> None:
        """Takes the next node of the old order."""
        waits = own_start_of(node) is not None
        reads = any(source in self._waiting for source in node.all_input_nodes)
        if (has_effect(node) and not is_own(node)) or (reads and node in self._needed and not waits):
            self.flush()
            self.nodes.append(node)
        elif waits or reads:
            self._waiting[node] = None
        elif node in self._needed:
            self.nodes.append(node)
        else:
            self._delay(node)

    def flush(self) -> None:
        """Gives a place to everything: first to what needs no collective that is under way."""
        self.nodes += [*self._delayed, *self._waiting]
        self._delayed.clear()
        self._waiting.clear()
        self._delayed_us = 0.0

    def _delay(self, node: fx.Node) -> None:
        self._delayed.append(node)
        self._delayed_us += self._times_us[node]
        while self._delayed_us > self._most_us:
            first = self._delayed.popleft()
            self._delayed_us -= self._times_us[first]
            self.nodes.append(first)


def _kept(step: StepGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of nodes of which the first has to stay in front of the other.

    Collectives of this package start in the order of what they wait for, and their order is decided already.
    """
    order = step.order()
    pairs = neighbours(list(starts_of(step)), order)
    yield from ((first, later) for first, later in pairs if order[first] < order[later])
    yield from kept_order(step.graph)


def _needed_by(starts: list[fx.Node]) -> frozenset[fx.Node]:
    """`starts` and all that they depend on."""
    found = set(starts)
    todo = list(starts)
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                todo.append(source)
    return frozenset(found)
