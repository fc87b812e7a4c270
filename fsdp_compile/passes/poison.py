"""Makes a use of freed memory show: gathered messages become NaN where they are freed, and messages are checked.

    %w = wait_tensor(%gathered) -> %w = wait_tensor(%gathered); fsdp_compile.check_message(%w, "what ... gathers")
    %y = mm(%x, %w); fsdp_compile.reshard([%w]) -> %y = mm(%x, %w); fsdp_compile.poison(%w); fsdp_compile.reshard([%w])

Whatever reads a parameter after that gets NaN, and so the reduced gradients, which are checked as well. A collective of
the program's own that sends a message reads it until its wait, and the message becomes NaN behind that. It is for
`options={"poison": True}`, and stands behind the verifier, which such reads would not pass.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fsdp_compile.ir.graph import Role, StepGraph, require, role_of
from fsdp_compile.ir.queries import aliases, last_of, waits_behind
from fsdp_compile.ops.effects import CHECK_MESSAGE, POISON, RESHARD

_CHECKED = {
    Role.GATHER_WAIT: "what {} gathers",
    Role.REDUCE_WAIT: "the reduced gradient of {}",
    Role.REPLICATE_WAIT: "the gradient of {}, summed over replicas,",
}


def poison_freed_messages(step: StepGraph) -> None:
    """Adds both operators to a graph that all passes have seen."""
    order = step.order()
    for node in list(order):
        role = role_of(node)
        if role in _CHECKED:
            with step.graph.inserting_after(node):
                units = ", ".join(unit or "the root unit" for unit in require(node).units)
                _call(node, CHECK_MESSAGE, node, _CHECKED[role].format(units))
        if node.target is RESHARD:
            users = {user for held in aliases(node.all_input_nodes) for user in held.users}
            last = last_of([node, *waits_behind(users)], order)
            with step.graph.inserting_before(node if last is node else last.next):
                for message in node.all_input_nodes:
                    _call(node, POISON, message)


def _call(serves: fx.Node, op: Any, *args: Any) -> None:
    """Records an operator without a record: it belongs to no pass."""
    node = serves.graph.call_function(op, args)
    node.meta["val"] = None
    if "stack_trace" in serves.meta:
        node.meta["stack_trace"] = serves.meta["stack_trace"]
