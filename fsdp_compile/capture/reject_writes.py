"""Refuses a compiled forward that writes into a gathered parameter: the graph's copy is freed, and the write lost.

Whatever writes in Dynamo's graph has been run on the fake result of the read, which counts writes as any tensor does;
so does each other tensor that shares its memory, as `.data`. What writes without counting is told by its name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fsdp_compile._torch.tensors import is_gathered, memory_id, tree_leaves
from fsdp_compile.capture.functions import READS
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.ir.source_line import source_line

_UNCOUNTED = re.compile(r"(_foreach|_fused|_amp_foreach)_.*_|set_")
"""Functions that write into their first argument, mostly a list of tensors."""
_IN_PLACE = re.compile(r"_*(setitem|i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift))_*|.*[^_]_")
"""Names of functions and methods that write."""


def refuse_writes(gm: fx.GraphModule, inputs: Sequence[object]) -> None:
    """Raises `UnsupportedModelError` if a Dynamo graph writes into the result of a read, of its own or an input."""
    # Bodies of checkpoints and branches are graphs of their own.
    nodes = [node for part in gm.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes]
    given = zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)
    reads = [placeholder for placeholder, value in given if is_gathered(value)]
    reads += [node for node in nodes if node.target in READS]
    memory = {memory_id(tensor) for read in reads for tensor in _tensors(read)}

    def are_read(values: object) -> bool:
        found = (leaf for leaf in tree_leaves(values) if isinstance(leaf, fx.Node))
        return any(memory_id(tensor) in memory for node in found for tensor in _tensors(node))

    uncounted = [node for node in nodes if are_read(_written_uncounted(node))]
    shared = (tensor for node in nodes for tensor in _tensors(node) if memory_id(tensor) in memory)
    if uncounted or any(tensor._version > 0 for tensor in shared):
        readers = [node for node in nodes if node.op != "output" and are_read(node.all_input_nodes)]
        raise UnsupportedModelError(
            "the compiled forward changes a gathered parameter in place, which would be lost",
            where=source_line(next(iter(uncounted), None) or max(readers, key=_seems_to_write, default=reads[0])),
            instead="do it between steps, under torch.no_grad(), to the parameters of model.parameters()",
        )


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    leaves = tree_leaves(node.meta.get("example_value"))
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)


def _written_uncounted(node: fx.Node) -> list[Any]:
    """The arguments that a function writes into without counting."""
    if _UNCOUNTED.fullmatch(_name(node)):
        return [*node.args[:1]]
    if node.target is F.batch_norm:
        arguments = inspect.signature(F.batch_norm).bind(*node.args, **node.kwargs).arguments
        if arguments.get("training"):
            return [arguments["running_mean"], arguments["running_var"]]
    return []


def _seems_to_write(node: fx.Node) -> bool:
    return bool(_IN_PLACE.fullmatch(_name(node)) or node.kwargs.get("out") or node.kwargs.get("inplace"))


def _name(node: fx.Node) -> str:
    name: str = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.partition(".")[0]  # that of an operator ends in its overload
