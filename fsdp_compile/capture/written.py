"""Which tensors a node of Dynamo's graph writes into."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from fsdp_compile._torch.tensors import OpOverload, OpOverloadPacket, tree_leaves

_OPERATORS: tuple[Callable[..., Any], ...] = (
    operator.setitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ipow,
    operator.imatmul,
)


class _Argument(NamedTuple):
    """Where a function takes an argument, and its default."""

    position: int
    name: str
    default: object = None

    def of(self, node: fx.Node) -> Any:
        if len(node.args) > self.position:
            return node.args[self.position]
        return node.kwargs.get(self.name, self.default)


_WRITTEN_IF: dict[Callable[..., Any], tuple[_Argument, tuple[_Argument, ...]]] = {
    F.batch_norm: (_Argument(5, "training"), (_Argument(1, "running_mean"), _Argument(2, "running_var"))),
    torch.batch_norm: (_Argument(5, "training"), (_Argument(3, "running_mean"), _Argument(4, "running_var"))),
    F.instance_norm: (
        _Argument(5, "use_input_stats", default=True),
        (_Argument(1, "running_mean"), _Argument(2, "running_var")),
    ),
    F.embedding: (_Argument(3, "max_norm"), (_Argument(1, "weight"),)),
    F.embedding_bag: (_Argument(3, "max_norm"), (_Argument(1, "weight"),)),
}
"""Functions whose names do not tell: if the first argument is true, or not `None`, they write into the others."""


def written_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose tensors `node` writes into, as far as its name, schema and arguments tell."""
    if node.op not in ("call_function", "call_method"):
        return
    yield from _nodes(node.kwargs.get("out"))
    if node.op == "call_method" and _is_in_place(str(node.target)):
        yield from _nodes(node.args[:1])
    elif node.op == "call_function":
        yield from _nodes(_written_by(node, node.target))


def _written_by(node: fx.Node, target: Any) -> Iterable[Any]:
    if isinstance(target, OpOverload):
        return list(_by_schema(node, target))
    if isinstance(target, OpOverloadPacket):
        return [written for name in target.overloads() for written in _by_schema(node, getattr(target, name))]
    if target in _WRITTEN_IF:
        condition, written = _WRITTEN_IF[target]
        asked = condition.of(node)
        return [each.of(node) for each in written] if asked is not None and asked is not False else []
    is_in_place = target in _OPERATORS or _is_in_place(getattr(target, "__name__", "")) or node.kwargs.get("inplace")
    return node.args[:1] if is_in_place else []


def _by_schema(node: fx.Node, overload: Any) -> Iterator[Any]:
    for position, argument in enumerate(overload._schema.arguments):
        if argument.is_write:
            yield node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)


def _nodes(value: Any) -> Iterator[fx.Node]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, fx.Node))


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("__") and name != "requires_grad_"
