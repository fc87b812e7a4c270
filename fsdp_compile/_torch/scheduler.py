"""Private names of Inductor's scheduler: its nodes, and the passes that it lets others run over them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch._inductor.dependencies import WeakDep
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch.utils._ordered_set import OrderedSet

try:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
except ImportError:  # an older torch has no such class, and caches nothing that a pass of the scheduler has changed
    CustomSchedulerPass = object  # type: ignore[assignment, misc]

__all__ = ["CustomSchedulerPass"]


def calls_operator(node: Any) -> bool:
    """Whether a node of the scheduler calls an operator, and is not a kernel of Inductor's or an item of a list."""
    return isinstance(node, ExternKernelSchedulerNode) and not isinstance(node.node, MultiOutput)


def run_in_order(calls: Sequence[Any]) -> None:
    """Makes each node depend on the one before it, for its place alone: no memory is held longer for it."""
    named = [(node, next(iter(node.get_buffer_names()))) for node in calls if node.get_buffer_names()]
    for (_, made), (after, waiting) in itertools.pairwise(named):
        after.add_fake_dep(WeakDep(made, mutating_buf=waiting, is_fake=True))


def note_dependencies(nodes: Sequence[Any]) -> None:
    """Notes again what each of all nodes depends on, directly or not, after some have got a dependency.

    The scheduler's own method does so before it joins nodes of `torch._foreach_*`, and fails afterwards.
    """
    for node, sources in sources_of(nodes).items():  # each after its sources
        ancestors: OrderedSet[str] = OrderedSet()
        for source in sources:
            ancestors |= source.get_operation_names()
            ancestors |= source.ancestors
        node.ancestors = ancestors


def sources_of(nodes: Sequence[Any]) -> dict[Any, list[Any]]:
    """For each node of the scheduler, those that have to come before it."""
    makers = {name: node for node in nodes for name in node.get_buffer_names()}
    found = {node: [makers.get(dependency.name) for dependency in node.unmet_dependencies] for node in nodes}
    return {node: [each for each in sources if each not in (None, node)] for node, sources in found.items()}
