"""Which collective of a graph has failed, so that the error can name what a rank has waited for.

A graph that runs operator by operator says at which node it failed. Of Inductor's code the line is known: it waits in
the order of the graph (`written_order.py`).
"""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Mapping

from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile.ir.graph import Role, record_of

_NODE = re.compile(r"While executing %(\w+)")
_LINE = re.compile(r"^[^#]*\bwait_tensor\.default\(")
_KINDS = {
    Role.GATHER_WAIT: "the all-gather of",
    Role.REDUCE_WAIT: "the reduce-scatter of gradients of",
    Role.REPLICATE_WAIT: "the all-reduce over replicas of gradients of",
}


def waits_of(graph: fx.Graph) -> dict[str, str]:
    """What a graph waits for, by the names of the nodes that wait, in its order."""
    waits = graph.find_nodes(op="call_function", target=collectives.wait_tensor.default, sort=True)
    found = {}
    for node in waits:
        record = record_of(node)
        known = None if record is None else _KINDS.get(record.role)
        named = "" if record is None else ", ".join(record.parameters)
        found[node.name] = "a collective of the program" if known is None else f"{known} {named}"
    return found


def failed_wait(error: BaseException, waits: Mapping[str, str]) -> str | None:
    """Which of the waits of a graph an error comes from; `None` where that is not known.

    Args:
        error: What calling the graph has raised.
        waits: `waits_of` the graph.
    """
    node = _NODE.search(str(error))
    if node is not None:
        return waits.get(node[1])
    for frame, number in traceback.walk_tb(error.__traceback__):
        lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
        numbers = [i for i, line in enumerate(lines, 1) if _LINE.search(line)]
        # Otherwise it is code of a part of the graph (`share_code`).
        if number in numbers and len(numbers) == len(waits):
            return list(waits.values())[numbers.index(number)]
    return None
