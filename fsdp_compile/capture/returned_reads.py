"""Makes gathered parameters that leave a graph what eager code reads: `GatheredParameter`s.

A graph returns one where code after a graph break uses it, or where a forward returns it. Dynamo breaks the graph for
`self.weight.data = ...`, so this is how the assignment is refused, which would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from fsdp_compile.layout.spec import parse
from fsdp_compile.modules.eager_reads import GatheredParameter, gathered_from
from fsdp_compile.ops.unshard import UNSHARD
from fsdp_compile.runtime.units import FSDPParamGroup


class ReturnedRead(NamedTuple):
    """A read whose result a graph returns.

    Attributes:
        output: Its position among the outputs.
        flat: Position of the flat parameter among the inputs.
        text: Of its `UnshardSpec`.
    """

    output: int
    flat: int
    text: str


def returned_reads(gm: fx.GraphModule) -> list[ReturnedRead]:
    """The reads whose results Dynamo's graph returns as they are."""
    place = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    (outputs,) = gm.graph.output_node().args
    assert isinstance(outputs, list | tuple)
    return [
        ReturnedRead(i, place[node.args[0]], str(node.args[1]))
        for i, node in enumerate(outputs)
        if isinstance(node, fx.Node) and node.target in (torch.ops.fsdp_compile.unshard, UNSHARD)
    ]


def give_parameters(compiled: Callable[..., Any], returned: list[ReturnedRead]) -> Callable[..., Any]:
    """Wraps a compiled graph so that it returns `GatheredParameter`s for these reads."""
    if not returned:
        return compiled

    def run(*args: Any) -> Any:
        groups = [FSDPParamGroup.of(args[each.flat]) for each in returned]
        outputs = list(compiled(*args))
        for each, group in zip(returned, groups, strict=True):
            gathered = outputs[each.output].as_subclass(GatheredParameter)
            if group is not None:
                (param,) = group.params_at([parse(each.text).offset])
                gathered_from(gathered, group, param)
            outputs[each.output] = gathered
        return outputs

    return run
