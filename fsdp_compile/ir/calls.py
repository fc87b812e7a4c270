"""The collectives that a graph starts as lines of text: what ranks compare, and by which a graph follows another one.

forward: all_gather_into_tensor of blocks.0.weight, blocks.0.bias (1088 float32)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fsdp_compile.ir.graph import EXCHANGES, STARTS, Role, StepGraph, require, role_of

_NAMES = re.compile(r"(?<= of )(.*?)(?= \()")
"""The names of parameters in a line."""


def starts_of(step: StepGraph) -> Iterator[fx.Node]:
    """The nodes that start a collective, in graph order."""
    return step.nodes(*STARTS, *EXCHANGES)


def group_of(node: fx.Node) -> str:
    """The alias of the group on which a collective runs."""
    if role_of(node) in EXCHANGES:
        return require(node).specs[0].group
    # The only text among the arguments that starts as aliases do.
    return next(a for a in node.args if isinstance(a, str) and a.startswith("fsdp."))


def line_of(node: fx.Node) -> str:
    """What a node starts: phase, operator, parameters, and elements and dtype of each message."""
    record = require(node)
    messages = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    if record.role is Role.LOOK_UP:  # the number of rows may differ between ranks
        messages = []
    sizes = ", ".join(f"{v.numel()} {str(v.dtype).removeprefix('torch.')}" for v in messages)
    operator = str(node.target).removeprefix("_c10d_functional.").removesuffix(".default")
    return f"{record.phase.value}: {operator} of {', '.join(record.parameters)} ({sizes})"


def names_in(line: str) -> list[str]:
    """The parameters of a line."""
    found = _NAMES.search(line)
    return found[1].split(", ") if found else []


def operator_in(line: str) -> str:
    """The operator of a line."""
    return line.partition(": ")[2].partition(" of ")[0]


def numbered(lines: Sequence[str]) -> list[str]:
    """The lines with each parameter as its place among those of all lines, in the order of their numbered names.

    Layers of one shape share a graph, which has the names of the layer that was called first: on a rank that compiles
    again for its own batch that may be another layer. The order of layers within a graph is the same for all that share
    it.
    """
    names = sorted({name for line in lines for name in names_in(line)}, key=natural)
    places = {name: str(i) for i, name in enumerate(names)}
    return [_NAMES.sub(lambda found: ", ".join(places[n] for n in found[1].split(", ")), line, 1) for line in lines]


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts `experts.9` before `experts.10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
