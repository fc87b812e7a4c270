"""A graph as a schedule for its lanes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch import fx

from fsdp_compile.cost.communicate import Communication, Kind, is_start, transfer_of
from fsdp_compile.cost.compute import NodeCost, node_costs
from fsdp_compile.cost.fusion import Kernels
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.timeline import Compute, Event, Start, Timeline, Wait, simulate
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.record import Role, role_of

_ITEMS = (Role.GATHER_ITEM, Role.REDUCE_ITEM, Role.REPLICATE_ITEM)
_WAITS = (
    Role.GATHER_WAIT,
    Role.REDUCE_WAIT,
    Role.REPLICATE_WAIT,
    Role.OFFLOAD_IN_WAIT,
    Role.OFFLOAD_OUT_WAIT,
)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a graph does, and when.

    Attributes:
        costs: Of every node.
        communications: Of every node that starts one, copies between host and device among them.
        timeline: All lanes; its keys are nodes.
    """

    costs: Mapping[fx.Node, NodeCost]
    communications: Mapping[fx.Node, Communication]
    timeline: Timeline


def schedule(step: StepGraph, hardware: Hardware, kernels: Kernels) -> Schedule:
    """Estimates when every node of a graph runs."""
    costs = node_costs(step.graph, hardware.device, kernels)
    communications = {node: transfer_of(node, hardware) for node in step.graph.nodes if is_start(node)}
    return Schedule(costs, communications, simulate(_events(step, costs, communications)))


def _events(
    step: StepGraph, costs: Mapping[fx.Node, NodeCost], communications: Mapping[fx.Node, Communication]
) -> Iterator[Event]:
    for node in step.graph.nodes:
        if node in communications:
            started = communications[node]
            yield Start(node, started.group, started.time_us, started.link)
            if started.kind is Kind.EXCHANGE:
                yield Wait((node, "done"), node)
        elif role_of(node) in _WAITS:
            yield Wait(node, start_of(node))
        else:
            yield Compute(node, costs[node].time_us)


def start_of(node: fx.Node) -> fx.Node:
    """The collective that a wait, or an item of a grouped one, belongs to."""
    while not is_start(node):
        node = node.all_input_nodes[0]
    return node


def waits_of(start: fx.Node) -> list[fx.Node]:
    """The waits for a collective, in the order of its messages."""
    running = [start, *(u for u in start.users if role_of(u) in _ITEMS)]
    return [user for node in running for user in node.users if role_of(user) in _WAITS]
