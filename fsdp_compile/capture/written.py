"""Which tensors a node of Dynamo's graph writes into."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx

from fsdp_compile._torch.tensors import OpOverload, OpOverloadPacket, tree_leaves
from fsdp_compile.modules.uncounted_writes import may_write, written_by

_OPERATORS: tuple[Callable[..., Any], ...] = (
    operator.setitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ipow,
    operator.imatmul,
)
_METHODS = frozenset({"__setitem__", *(f"__{function.__name__}__" for function in _OPERATORS[1:])})
"""Methods of tensors that are these operators."""


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
    if may_write(target):
        return written_by(target, node.args, node.kwargs)
    is_in_place = target in _OPERATORS or _is_in_place(getattr(target, "__name__", "")) or _is_asked_to(node, target)
    return node.args[:1] if is_in_place else []


def _is_asked_to(node: fx.Node, target: Any) -> bool:
    """Whether a call has a true `inplace`: by name, or by position, as torch's modules give it to its functions."""
    is_of_torch = getattr(target, "__module__", None) == "torch.nn.functional"
    position = _position_of_inplace(target) if is_of_torch else None
    given = node.args[position] if position is not None and position < len(node.args) else node.kwargs.get("inplace")
    return bool(given)


@functools.cache  # of functions that a module of torch has, and so of none that would otherwise be freed
def _position_of_inplace(function: Any) -> int | None:
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of C++ without a text signature
        return None
    return parameters.index("inplace") if "inplace" in parameters else None


def _by_schema(node: fx.Node, overload: Any) -> Iterator[Any]:
    for position, argument in enumerate(overload._schema.arguments):
        if argument.is_write:
            yield node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)


def _nodes(value: Any) -> Iterator[fx.Node]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, fx.Node))


def _is_in_place(name: str) -> bool:
    return name in _METHODS or (name.endswith("_") and not name.startswith("__") and name != "requires_grad_")
