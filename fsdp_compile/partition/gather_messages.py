"""Replaces the markers of all-gather extensions by collectives, which stay where the program has them.

%g = fsdp_compile.gather_message(%message, 2, group, spec)     ->     %a = all_gather(%message, 2, group)
%g = wait(%a)
"""

from __future__ import annotations

from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile.ops.gather_message import GATHER_MESSAGE


def expand_gather_messages(graph: fx.Graph) -> None:
    """Rewrites a forward or a backward graph."""
    for node in graph.find_nodes(op="call_function", target=GATHER_MESSAGE):
        message, size, group, _ = node.args
        with graph.inserting_before(node):
            started = graph.call_function(collectives.all_gather_into_tensor.default, (message, size, group))
            gathered = graph.call_function(collectives.wait_tensor.default, (started,))
        for made in (started, gathered):
            made.meta = dict(node.meta)
        node.replace_all_uses_with(gathered)
        graph.erase_node(node)
