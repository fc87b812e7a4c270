"""What a plan expects of the graph that it was applied to: its calls of communication, with their estimated times."""

from __future__ import annotations

from typing import Final

from torch import fx

from fsdp_compile._torch.tensors import OpOverload
from fsdp_compile.cost.communicate import communication
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.timeline import start_of
from fsdp_compile.ir.graph import Role, StepGraph, role_of
from fsdp_compile.passes.schedule_auto import SchedulePlan
from fsdp_compile.planner.measured_times import Call, PlannedTimes, Transfer

COLLECTIVES: Final = "_c10d_functional"
"""Namespace of the operators that start collectives and wait for them."""
_STARTS: Final = (Role.GATHER, Role.REDUCE, Role.REPLICATE)
_WAITS: Final = (Role.GATHER_WAIT, Role.REDUCE_WAIT, Role.REPLICATE_WAIT)


def planned_times(step: StepGraph, plan: SchedulePlan, hardware: Hardware, after: int) -> PlannedTimes | None:
    """What a plan expects of a graph after all passes; `None` where collectives of ours are other operators (hooks).

    Args:
        step: The graph.
        plan: That was applied to it.
        hardware: What times are estimated for.
        after: Steps to measure.
    """
    numbers: dict[fx.Node, int] = {}
    transfers: list[Transfer] = []
    calls: list[Call] = []
    for node in step.graph.nodes:
        if not _communicates(node):
            if role_of(node) in _STARTS:
                return None
            continue
        known: int | None = None
        if role_of(node) in _STARTS:
            known = numbers[node] = len(transfers)
            sent = communication(node, hardware)
            transfers.append(Transfer(sent.group, sent.link, sent.time_us))
        elif role_of(node) in _WAITS:
            known = numbers.get(start_of(node))
        calls.append(Call(waits=is_wait(node.target), transfer=known))
    return PlannedTimes(
        after, plan.problem.compute_us, tuple(transfers), tuple(calls), plan.problem, plan.placement, plan.budget_bytes
    )


def is_wait(operator: OpOverload) -> bool:
    """Whether an operator of communication waits for a collective."""
    return operator._schema.name.removeprefix(f"{COLLECTIVES}::").startswith("wait")


def _communicates(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == COLLECTIVES
