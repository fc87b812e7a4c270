"""Refuses in-place changes of parameters inside a compiled region, which would be lost or seen too late.

A read gives a copy, so what is written into it is lost. The DTensor that `parameters()` gives under `no_grad()` is the
sharded parameter itself, but a graph that also reads the flat parameter does not know that they share memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fsdp_compile._torch.tensors import memory_id
from fsdp_compile.capture.written import written_nodes
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.ir.source_line import source_line
from fsdp_compile.modules.eager_reads import is_gathered
from fsdp_compile.ops.unshard import UNSHARD
from fsdp_compile.runtime.extended_reads import read_extended
from fsdp_compile.runtime.units import FSDPParamGroup


def refuse_updates(gm: fx.GraphModule, inputs: Sequence[object]) -> None:
    """Refuses a Dynamo graph that writes into a gathered parameter, or into one that it also reads.

    Raises:
        UnsupportedModelError: If there is such a write, with the line of the model that makes it.
    """
    names = _read_parameters(inputs)
    guarded: dict[int, str] = {}
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if is_gathered(value):  # read before a graph break
            guarded |= dict.fromkeys(_memory(node), "a gathered parameter")
        if id(value) in names:
            guarded |= {key: names[id(value)] for key in _memory(node)}
    # Bodies of checkpoints and branches are graphs of their own.
    nodes = [node for part in gm.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes]
    reads = [node for node in nodes if node.target in (torch.ops.fsdp_compile.unshard, UNSHARD, read_extended)]
    for node in reads:
        guarded |= dict.fromkeys(_memory(node), "a gathered parameter")
    for node in nodes:
        for key in (key for target in written_nodes(node) for key in _memory(target)):
            if key in guarded:
                raise _refusal(node, guarded[key])
    for node in reads:
        # Whatever wrote: Dynamo has run it on this tensor, which counts writes as any tensor does.
        if isinstance(made := node.meta.get("example_value"), torch.Tensor) and made._version > 0:
            raise _refusal(node, "a gathered parameter")


def _read_parameters(inputs: Sequence[object]) -> dict[int, str]:
    """`id` of each parameter whose flat parameter is an input, with its description for errors."""
    flats = [FSDPParamGroup.of(value) for value in inputs if isinstance(value, torch.Tensor)]
    return {
        id(slot.parameter): f"a parameter of {flat.unit.title}"
        for flat in flats
        if flat is not None
        for slot in flat.params
    }


def _memory(node: fx.Node) -> Iterator[int]:
    """Ids of the memory of a node's tensors."""
    for value in tree_leaves(node.meta.get("example_value")):
        if isinstance(value, torch.Tensor):
            yield memory_id(value)


def _refusal(node: fx.Node, written: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the compiled forward changes {written} in place, which would be lost",
        where=source_line(node),
        instead="do it between steps, or in a function under @torch.compiler.disable and torch.no_grad() that takes "
        "the parameter from parameters()",
    )
