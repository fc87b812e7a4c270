"""What two nodes share that take the same time: operator, types of its arguments, and their numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from fsdp_compile.cost.fusion import Kernels, is_fusible, launches_nothing
from fsdp_compile.cost.sizes import concrete
from fsdp_compile.ir.record import record_of


def signature_of(node: fx.Node) -> str:
    """A text that nodes share which do the same to values of the same types, in any model and on any rank."""
    return f"{node.target}{tree_map(_spell, (node.args, dict(sorted(node.kwargs.items()))))}"


def runs_alone(node: fx.Node, kernels: Kernels) -> bool:
    """Whether a node of the model's own is a kernel by itself, so that its time can be measured apart."""
    if node.op != "call_function" or record_of(node) is not None or launches_nothing(node):
        return False
    return not (is_fusible(node) and kernels.fused)


def value_of(argument: Any) -> Any:
    """The fake value of an argument that is a node."""
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def is_measurable(node: fx.Node) -> bool:
    """Whether values of a node's arguments can be made up: tensors and plain numbers, no tokens of a random state."""
    return all(
        value is None or isinstance(value, torch.Tensor | int | float | bool | str | torch.dtype | torch.device)
        for value in tree_leaves(tree_map(value_of, (node.args, dict(node.kwargs))))
    )


def _spell(argument: Any) -> str:
    value = value_of(argument)
    if not isinstance(value, torch.Tensor):
        return str(value)
    shape, strides = ([concrete(n) for n in of] for of in (value.shape, value.stride()))
    return f"{str(value.dtype).removeprefix('torch.')}{shape}{strides}"
