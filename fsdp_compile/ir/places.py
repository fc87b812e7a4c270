"""Which module of the user's a node computes for."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import fx

from fsdp_compile.ir.record import record_of

_ROOT = re.compile(r"^[LG]\['[^']*'\]")
_ITEM = re.compile(r"\._modules\['([^']*)'\]|\['?([^'\]]*)'?\]")


def module_of(node: fx.Node) -> str:
    """Path of the innermost module, such as "layers.0.mlp"; of our own nodes, the unit; empty if neither is known."""
    record = record_of(node)
    if record is not None:
        return record.unit
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not isinstance(stack, Mapping) or not stack:
        return ""
    innermost = list(stack.values())[-1]
    path = innermost[0] if isinstance(innermost, tuple) else str(innermost)
    path = _ITEM.sub(lambda m: f".{m[1] or m[2]}", _ROOT.sub("", path))
    return path.removeprefix("._orig_mod").removeprefix(".")


def unit_of(path: str, units: frozenset[str]) -> str:
    """The innermost unit at or above a module, or the module's outermost name."""
    name = path
    while name:
        if name in units:
            return name
        name = name.rpartition(".")[0]
    return path.partition(".")[0]
