"""Refuses a compiled forward that writes into a gathered parameter: the graph's copy is freed, and the write lost.

Whatever writes in Dynamo's graph has been run on the fake result of the read, which counts writes as any tensor does.
Functions that write without counting (into `.data`, or `max_norm` of an embedding) are told by their schemas.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fsdp_compile._torch.tensors import OpOverload, OpOverloadPacket, is_gathered, memory_id, tree_leaves
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.ir.source_line import source_line
from fsdp_compile.ops.unshard import UNSHARD

_MARKERS = (torch.ops.fsdp_compile.unshard, UNSHARD)
_ASSIGNMENTS = {
    getattr(operator, name)
    for name in (
        "setitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow",
        "iand", "ior", "ixor", "ilshift", "irshift",
    )
}  # fmt: skip
"""Operators that write into their first argument."""
_IF_ASKED = {
    F.embedding: ("max_norm", ("weight",)),
    F.embedding_bag: ("max_norm", ("weight",)),
    F.batch_norm: ("training", ("running_mean", "running_var")),
}
"""Functions that write into some arguments, which fake tensors do not count, if another argument says so."""


def refuse_writes(gm: fx.GraphModule, inputs: Sequence[object]) -> None:
    """Refuses a Dynamo graph that writes into the result of a read.

    Args:
        gm: The graph.
        inputs: Its inputs, among which there may be what an earlier graph has read.

    Raises:
        UnsupportedModelError: If there is such a write, with the line of the model that makes it.
    """
    # Bodies of checkpoints and branches are graphs of their own.
    nodes = [node for part in gm.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes]
    given = zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)
    reads = [placeholder for placeholder, value in given if is_gathered(value)]
    reads += [node for node in nodes if node.target in _MARKERS]
    memory = {key for read in reads for key in _memory(read)}
    for node in nodes:
        if any(key in memory for written in _written(node) for key in _memory(written)):
            raise _refusal(node)
    for read in reads:
        if isinstance(made := read.meta.get("example_value"), torch.Tensor) and made._version > 0:
            raise _refusal(next(iter(read.users), read))


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes into whose tensors a node writes, as far as its schema tells."""
    if node.op not in ("call_function", "call_method"):
        return
    for value in (node.kwargs.get("out"), *_written_arguments(node)):
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, fx.Node))


def _written_arguments(node: fx.Node) -> Iterator[Any]:
    target: Any = node.target
    # A call of `torch.nn.functional` may have a true `inplace`.
    is_functional = getattr(target, "__module__", None) == F.__name__
    if target in _ASSIGNMENTS or (is_functional and _arguments(target, node).get("inplace")):
        yield node.args[:1]
    elif target in _IF_ASKED:
        (asks, written), given = _IF_ASKED[target], _arguments(target, node)
        if given.get(asks) is not None and given[asks] is not False:
            yield [given.get(name) for name in written]
    else:
        for overload in _overloads(target):
            for position, argument in enumerate(overload._schema.arguments):
                if argument.is_write and not argument.is_out:
                    yield node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)


def _overloads(target: Any) -> list[Any]:
    if isinstance(target, OpOverload):
        return [target]
    if not isinstance(target, OpOverloadPacket):
        # A method of tensors, or a function of torch's: the operator of its name, if it is one. Python's are none.
        is_method = isinstance(target, str) or inspect.ismethoddescriptor(target)
        is_of_torch = is_method or str(getattr(target, "__module__", "")).startswith("torch")
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        name = _METHODS.get(name, name)
        target = getattr(torch.ops.aten, name, None) if is_of_torch and not name.startswith("__") else None
        if target is None:
            return []
    return [getattr(target, name) for name in target.overloads()]


_METHODS = {
    "__setitem__": "fill_",
    **{f"__{f.__name__}__": f"{f.__name__[1:]}_" for f in _ASSIGNMENTS if f is not operator.setitem},
    "__itruediv__": "div_",
    "__imod__": "remainder_",
    "__ifloordiv__": "floor_divide_",
    "__iand__": "bitwise_and_",
    "__ior__": "bitwise_or_",
    "__ixor__": "bitwise_xor_",
    "__ilshift__": "bitwise_left_shift_",
    "__irshift__": "bitwise_right_shift_",
}
"""Methods of tensors by which Python's assignments are done, and an operator that writes into the same argument."""


def _arguments(function: Any, node: fx.Node) -> dict[str, Any]:
    try:
        return dict(inspect.signature(function).bind(*node.args, **node.kwargs).arguments)
    except (TypeError, ValueError):  # of C++ without a text signature
        return dict(node.kwargs)


def _memory(node: fx.Node) -> Iterator[int]:
    """Ids of the memory of a node's tensors."""
    for value in tree_leaves(node.meta.get("example_value")):
        if isinstance(value, torch.Tensor):
            yield memory_id(value)


def _refusal(node: fx.Node) -> UnsupportedModelError:
    return UnsupportedModelError(
        "the compiled forward changes a gathered parameter in place, which would be lost",
        where=source_line(node),
        instead="do it between steps, under torch.no_grad(), to the parameters of model.parameters()",
    )
