"""Bytes of values in a graph."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fsdp_compile._torch.dynamo import hint_of


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors among a node's results, in order."""
    return tensors_of_value(node.meta.get("val"))


def tensors_of_value(value: object) -> list[torch.Tensor]:
    """The tensors in a value, in order."""
    if isinstance(value, torch.Tensor):  # nearly always
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def tensor_bytes(value: torch.Tensor) -> int:
    """Bytes of the memory that a tensor's strides reach, gaps included."""
    shape, strides = ([concrete(n) for n in of] for of in (value.shape, value.stride()))
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
