"""Private names of Inductor's scheduler: its nodes, and the passes that it lets others run over them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch._inductor.custom_graph_pass import CustomPassBase
from torch._inductor.dependencies import WeakDep
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import ExternKernelSchedulerNode

try:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
except ImportError:  # an older torch has no such class, and caches nothing that a pass of the scheduler has changed
    CustomSchedulerPass = CustomPassBase  # type: ignore[assignment, misc]

__all__ = ["CustomSchedulerPass"]


def calls_operator(node: Any) -> bool:
    """Whether a node of the scheduler calls an operator, and is not a kernel of Inductor's or an item of a list."""
    return isinstance(node, ExternKernelSchedulerNode) and not isinstance(node.node, MultiOutput)


def run_in_order(calls: Sequence[Any]) -> None:
    """Makes each node depend on the one before it, for its place alone: no memory is held longer for it."""
    for before, after in itertools.pairwise(calls):
        made, waiting = (next(iter(node.get_buffer_names())) for node in (before, after))
        after.add_fake_dep(WeakDep(made, mutating_buf=waiting, is_fake=True))


def note_dependencies(nodes: Sequence[Any]) -> None:
    """Lets the scheduler find again what each of all its nodes depends on, after some have got a dependency."""
    nodes[0].scheduler.compute_ancestors()


def users_of(nodes: Sequence[Any]) -> dict[Any, list[Any]]:
    """For each node of the scheduler, those that have to come after it."""
    makers = {name: node for node in nodes for name in node.get_buffer_names()}
    users: dict[Any, list[Any]] = {node: [] for node in nodes}
    for node in nodes:
        for dependency in node.unmet_dependencies:
            maker = makers.get(dependency.name)
            if maker is not None and maker is not node:
                users[maker].append(node)
    return users
