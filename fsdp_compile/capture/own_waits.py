"""The program's waits for several messages, written as waits for one each.

    before    %c = all_reduce_coalesced([%a, %b], ...)   %w = wait_tensors([%c[0], %c[1]])   %w[0], %w[1]
    after     %c = all_reduce_coalesced([%a, %b], ...)   wait_tensor(%c[0]), wait_tensor(%c[1])

Torch traces them so since 2.15. Whatever orders or checks collectives knows one kind of wait.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fsdp_compile._torch.distributed import collectives


def wait_one_by_one(graph: fx.Graph) -> None:
    """Rewrites the waits of a graph that AOTAutograd made."""
    for wait in graph.find_nodes(op="call_function", target=_WAIT_FOR_ALL):
        for item in list(wait.users):
            messages: Any = wait.args[0]
            with graph.inserting_before(wait):
                one = graph.call_function(collectives.wait_tensor.default, (messages[item.args[1]],))
            one.meta = dict(item.meta)
            item.replace_all_uses_with(one)
            graph.erase_node(item)
        graph.erase_node(wait)


_WAIT_FOR_ALL: Any = getattr(getattr(collectives, "wait_tensors", None), "default", "no such operator")
