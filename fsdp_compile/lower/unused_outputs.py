"""Outputs that a loss does not use: parameters that only these depend on get no gradient, instead of zeros.

AOTAutograd differentiates a graph as a whole, and autograd gives it zeros for the outputs that a loss leaves out; its
backward makes zeros of them, with which optimizers decay parameters, and move them by their momentum. Here the
backward is told which outputs have no gradient. It computes with zeros all the same, since the gradients of several
parameters travel in one message. Another rank's loss may use the output: ranks tell each other before each backward of
a graph for which it makes a difference, and parameters whose outputs no rank uses get no gradient.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from fsdp_compile._torch.distributed import largest
from fsdp_compile.comm import groups
from fsdp_compile.comm.failures import explained
from fsdp_compile.ir.graph import Role, StepGraph, require, role_of
from fsdp_compile.ir.queries import GRADIENTS_OF_READS, flat_of, read_text
from fsdp_compile.layout.spec import parse

Size: TypeAlias = "int | sympy.Expr"
Sources: TypeAlias = Mapping[tuple[Hashable, int], frozenset[str]]
"""By parameter group and offset: from the gradients of which outputs, by the names of their inputs, a gradient is."""
_LOCAL = frozenset({"aten", "prims", "fsdp_compile"})
"""Namespaces of operators that do not communicate before the passes have run."""


def tangents_of(step: StepGraph) -> list[int]:
    """Positions of the gradients of outputs among a backward graph's inputs."""
    placeholders = enumerate(step.graph.find_nodes(op="placeholder"))
    return [i for i, node in placeholders if node.name.startswith("tangents")]


def gradient_sources(backward: StepGraph) -> Sources | None:
    """The sources of the gradients in a backward before the passes join its messages.

    A gradient without any source is not among them: it is zero by itself, whatever the loss. `None` if all have the
    same sources, or if the graph has something in it by which other ranks' losses may reach a gradient, or whose
    outputs' gradients are no plain tensors: zeros are left then.
    """
    placeholders = backward.graph.find_nodes(op="placeholder")
    tangents = [placeholders[i] for i in tangents_of(backward)]
    if len(tangents) < 2 or not all(isinstance(node.meta.get("val"), torch.Tensor) for node in tangents):
        return None
    bits = {tangent: 1 << i for i, tangent in enumerate(tangents)}
    for node in backward.graph.nodes:
        bits.setdefault(node, 0)
        for given in node.all_input_nodes:
            bits[node] |= bits[given]
    params: dict[tuple[Hashable, int], int] = {}
    for marker in (node for node in backward.graph.nodes if node.target in GRADIENTS_OF_READS):
        key = flat_of(require(marker.args[0])), parse(read_text(marker)).offset
        params[key] = params.get(key, 0) | bits[marker]
    if {*params.values()} <= {0, (1 << len(tangents)) - 1}:
        return None
    # Functions of Python, on sizes, have no namespace.
    namespaces = {getattr(node.target, "namespace", "aten") for node in backward.graph.nodes}
    known = {expression for expression, _ in _sizes_among(placeholders)}
    symbols = {symbol for node in tangents for size in _layout(node) for symbol in sympy.sympify(size).free_symbols}
    if not namespaces <= _LOCAL or not symbols <= known:
        return None
    return {
        key: frozenset(tangent.name for i, tangent in enumerate(tangents) if mask >> i & 1)
        for key, mask in params.items()
        if mask
    }


def _sizes_among(placeholders: Sequence[fx.Node]) -> tuple[tuple[sympy.Expr, int], ...]:
    values = enumerate(node.meta.get("val") for node in placeholders)
    return tuple((value.node.expr, i) for i, value in values if isinstance(value, torch.SymInt))


def _layout(node: fx.Node) -> tuple[Size, ...]:
    value = node.meta["val"]
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in (*value.shape, *value.stride()))


@dataclasses.dataclass(frozen=True)
class OutputGradient:
    """The gradient of an output among the inputs of a backward."""

    position: int
    layout: tuple[Size, ...]
    """Its sizes, and then its strides."""
    dtype: torch.dtype
    device: torch.device

    def zeros(self, sizes: Mapping[sympy.Expr, int]) -> torch.Tensor:
        """What stands for it where it is undefined, given what symbolic sizes are."""
        layout = [each if isinstance(each, int) else int(each.xreplace(sizes)) for each in self.layout]
        half = len(layout) // 2
        return torch.empty_strided(layout[:half], layout[half:], dtype=self.dtype, device=self.device).zero_()


@dataclasses.dataclass(frozen=True)
class UnusedOutputs:
    """What a backward has to know where a loss may leave outputs out; positions are those of its inputs.

    `gradients` are those of its outputs, `sizes` says where symbolic sizes are, and `sources` from which gradients that
    of a parameter is computed, by flat parameter and offset.
    """

    gradients: tuple[OutputGradient, ...]
    sizes: tuple[tuple[sympy.Expr, int], ...]
    sources: Mapping[int, Mapping[int, frozenset[int]]]

    @staticmethod
    def of(step: StepGraph, sources: Sources) -> UnusedOutputs:
        """For the transformed backward, whose inputs have kept their names."""
        placeholders = step.graph.find_nodes(op="placeholder")
        place = {node.name: i for i, node in enumerate(placeholders)}
        flats = {flat_of(require(node)): i for i, node in enumerate(placeholders) if role_of(node) is Role.FLAT}
        found: dict[int, dict[int, frozenset[int]]] = {}
        for (key, offset), names in sources.items():
            found.setdefault(flats[key], {})[offset] = frozenset(place[name] for name in names)
        tangents = [(i, placeholders[i], placeholders[i].meta["val"]) for i in tangents_of(step)]
        gradients = tuple(OutputGradient(i, _layout(node), made.dtype, made.device) for i, node, made in tangents)
        return UnusedOutputs(gradients, _sizes_among(placeholders), found)

    def find(
        self, args: list[Any], ranks: Mapping[int, tuple[str, ...]], waiting: Mapping[int, Collection[int]]
    ) -> dict[int, set[int]]:
        """Puts zeros in the place of gradients that are undefined; finds parameters that no rank's loss depends on.

        Args:
            args: Of the backward.
            ranks: Names of the groups of ranks that call this together, for each flat parameter, by position.
            waiting: Offsets of the parameters that have gradients of earlier backwards, which this one adds.

        Returns:
            Offsets, by flat parameter.
        """
        undefined = [each for each in self.gradients if args[each.position] is None]
        sizes = {expression: args[i] for expression, i in self.sizes} if undefined else {}
        for each in undefined:
            args[each.position] = each.zeros(sizes)
        missing = {each.position for each in undefined}
        # By parameter, since ranks may return other outputs, or the same in another order.
        params: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for flat in sorted(ranks):
            params.setdefault(ranks[flat], []).extend((flat, offset) for offset in sorted(self.sources[flat]))
        found: dict[int, set[int]] = {flat: set() for flat in ranks}
        for names, keys in params.items():
            used = [int(not self.sources[flat][at] <= missing or at in waiting[flat]) for flat, at in keys]
            for place in filter(None, map(groups.rank_store, names)):
                with explained("where ranks compare which outputs their losses use"):
                    used = largest(used, groups.comparing_group(place))
            for flat, offset in itertools.compress(keys, (not each for each in used)):
                found[flat].add(offset)
        return found
