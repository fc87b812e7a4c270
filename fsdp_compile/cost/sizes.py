"""Bytes of values in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fsdp_compile._torch.dynamo import hint_of

Number = Callable[[Any], Any]


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors among a node's results, in order."""
    return tensors_of_value(node.meta.get("val"))


def tensors_of_value(value: object) -> list[torch.Tensor]:
    """The tensors in a value, in order."""
    if isinstance(value, torch.Tensor):  # nearly always
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def tensor_bytes(value: torch.Tensor, number: Number | None = None) -> Any:
    """Bytes of the memory that a tensor's strides reach, gaps included.

    `number` reads a size; by default as the number at which it was traced.
    """
    read = number or concrete
    shape, strides = [read(s) for s in value.shape], [read(s) for s in value.stride()]
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))) * value.element_size()


def result_bytes(node: fx.Node) -> int:
    """Bytes of all of a node's results."""
    return sum(map(tensor_bytes, tensors_of(node)))


LARGEST_UNKNOWN: Final = 8192
"""What a size that depends on data counts as at most; as Inductor counts it."""


def concrete(size: Any) -> int:
    """A size as a number: for a dynamic one, the size at which it was traced; else a bound of it."""
    return size if isinstance(size, int) else hint_of(size, LARGEST_UNKNOWN)


class Sizes:
    """Sizes of values in a graph; here as numbers, in subclasses as expressions."""

    def values(self, value: Any) -> Any:
        """The value of an argument that FLOP formulas take."""
        return value.meta.get("val") if isinstance(value, fx.Node) else value

    def number(self, size: Any) -> Any:
        """One size."""
        return concrete(size)

    def pieces(self, node: fx.Node) -> list[Any]:
        """Bytes of each tensor among a node's results."""
        return [tensor_bytes(t) for t in tensors_of(node)]

    def total(self, node: fx.Node) -> Any:
        """Bytes of all of them."""
        return sum(self.pieces(node))


NUMBERS = Sizes()
