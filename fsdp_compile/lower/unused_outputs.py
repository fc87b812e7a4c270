"""Outputs that a loss does not use: parameters that only these depend on get no gradient, instead of zeros.

AOTAutograd differentiates a graph as a whole, and autograd gives it zeros for the outputs that a loss leaves out; its
backward makes zeros of them, with which optimizers decay parameters, and move them by their momentum. Here the
backward is told which outputs have no gradient. It computes with zeros all the same, since the gradients of several
parameters travel in one message, and then keeps the zeros from those parameters that have nothing else.

A rank whose own loss leaves an output out needs its gradients if another rank's does not, so ranks compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from fsdp_compile._torch.autograd import leave_unused_undefined
from fsdp_compile.ir.graph import Role, StepGraph, require, role_of
from fsdp_compile.ir.queries import GRADIENTS_OF_READS, read_text
from fsdp_compile.layout.spec import parse
from fsdp_compile.lower.wrappers import Compiled, FlatKey, flat_key, tangents_of
from fsdp_compile.runtime.units import FSDPParamGroup
from fsdp_compile.runtime.used_outputs import used_on_any_rank

Size: TypeAlias = "int | sympy.Expr"


@dataclasses.dataclass(frozen=True)
class GradientSources:
    """From the gradients of which outputs a backward computes each of its own: the names of their inputs.

    Attributes:
        of_params: By parameter group and offset.
        of_inputs: By position among the outputs of the backward; gradients of inputs that are no parameters.
    """

    of_params: Mapping[tuple[FlatKey, int], frozenset[str]]
    of_inputs: Mapping[int, frozenset[str]]


def gradient_sources(backward: StepGraph) -> GradientSources | None:
    """The sources in a backward before the passes join its messages; `None` if all gradients have the same ones.

    A gradient without any source is not in it: it is zero by itself, whatever the loss.
    """
    placeholders = backward.graph.find_nodes(op="placeholder")
    tangents = [placeholders[i] for i in tangents_of(backward)]
    if len(tangents) < 2 or not any(role_of(node) is Role.FLAT for node in placeholders):
        return None
    from_outputs = _propagated(backward, {tangent: 1 << i for i, tangent in enumerate(tangents)})
    markers = [node for node in backward.graph.nodes if node.target in GRADIENTS_OF_READS]
    params: dict[tuple[FlatKey, int], int] = {}
    for marker in markers:
        key = flat_key(require(marker.args[0])), parse(read_text(marker)).offset
        params[key] = params.get(key, 0) | from_outputs[marker]
    of_a_flat = _propagated(backward, dict.fromkeys(markers, 1))
    (returned,) = backward.output.args
    assert isinstance(returned, list | tuple)
    inputs = {
        i: from_outputs[node] for i, node in enumerate(returned) if isinstance(node, fx.Node) and not of_a_flat[node]
    }
    found = {*params.values(), *inputs.values()} - {0}
    if found <= {(1 << len(tangents)) - 1} or not _has_known_sizes(placeholders, tangents):
        return None

    def named(mask: int) -> frozenset[str]:
        return frozenset(tangent.name for i, tangent in enumerate(tangents) if mask >> i & 1)

    return GradientSources(
        {key: named(mask) for key, mask in params.items() if mask},
        {i: named(mask) for i, mask in inputs.items() if mask},
    )


def _propagated(step: StepGraph, start: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """For each node the bits of those nodes in `start` that it is computed from."""
    bits: dict[fx.Node, int] = {}
    for node in step.graph.nodes:
        bits[node] = start.get(node, 0)
        for given in node.all_input_nodes:
            bits[node] |= bits[given]
    return bits


def _has_known_sizes(placeholders: Sequence[fx.Node], tangents: Sequence[fx.Node]) -> bool:
    known = {expression for expression, _ in _sizes_among(placeholders)}
    symbols = {symbol for node in tangents for size in _layout(node) for symbol in sympy.sympify(size).free_symbols}
    return symbols <= known


def _sizes_among(placeholders: Sequence[fx.Node]) -> tuple[tuple[sympy.Expr, int], ...]:
    values = enumerate(node.meta.get("val") for node in placeholders)
    return tuple((value.node.expr, i) for i, value in values if isinstance(value, torch.SymInt))


def _layout(node: fx.Node) -> tuple[Size, ...]:
    value = node.meta["val"]
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in (*value.shape, *value.stride()))


@dataclasses.dataclass(frozen=True)
class OutputGradient:
    """The gradient of an output among the inputs of a backward.

    Attributes:
        layout: Its sizes, and then its strides.
    """

    position: int
    layout: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device

    def zeros(self, sizes: Mapping[sympy.Expr, int]) -> torch.Tensor:
        """What stands for it where it is undefined, given what symbolic sizes are."""
        layout = [each if isinstance(each, int) else int(each.xreplace(sizes)) for each in self.layout]
        half = len(layout) // 2
        return torch.empty_strided(layout[:half], layout[half:], dtype=self.dtype, device=self.device).zero_()


@dataclasses.dataclass(frozen=True)
class UnusedOutputs:
    """How a backward finds outputs that no rank uses, and what it leaves undefined for them; positions are its inputs'.

    Attributes:
        gradients: The gradients of its outputs.
        sizes: Where symbolic sizes are.
        of_params: From which of them the gradient of a parameter is computed, by position of the flat parameter and
            offset.
        of_inputs: The same for gradients of inputs, by position among the results.
    """

    gradients: tuple[OutputGradient, ...]
    sizes: tuple[tuple[sympy.Expr, int], ...]
    of_params: Mapping[tuple[int, int], frozenset[int]]
    of_inputs: Mapping[int, frozenset[int]]

    @staticmethod
    def of(step: StepGraph, sources: GradientSources) -> UnusedOutputs:
        """For the transformed backward, whose inputs have kept their names."""
        placeholders = step.graph.find_nodes(op="placeholder")
        place = {node.name: i for i, node in enumerate(placeholders)}
        flats = {flat_key(require(node)): i for i, node in enumerate(placeholders) if role_of(node) is Role.FLAT}

        def places(names: frozenset[str]) -> frozenset[int]:
            return frozenset(place[name] for name in names)

        return UnusedOutputs(
            tuple(_output_gradient(placeholders[i], i) for i in tangents_of(step)),
            _sizes_among(placeholders),
            {(flats[key], offset): places(names) for (key, offset), names in sources.of_params.items()},
            {i: places(names) for i, names in sources.of_inputs.items()},
        )

    def fill(self, args: list[Any]) -> list[bool]:
        """Puts zeros in the place of gradients that are undefined; returns which were not."""
        used = [args[each.position] is not None for each in self.gradients]
        sizes = {} if all(used) else {expression: args[i] for expression, i in self.sizes}
        for each, is_used in zip(self.gradients, used, strict=True):
            if not is_used:
                args[each.position] = each.zeros(sizes)
        return used

    def params_of(self, flat: int, unused: frozenset[int]) -> frozenset[int]:
        """The offsets of those parameters in a flat parameter that only `unused` outputs depend on."""
        return frozenset(
            offset for (place, offset), sources in self.of_params.items() if place == flat and sources <= unused
        )


def leave_undefined(compiled: Compiled, outputs: UnusedOutputs) -> Compiled:
    """Wraps a compiled backward that gets `None` for outputs that are not used."""
    flats = sorted({flat for flat, _ in outputs.of_params})

    def run(args: list[Any]) -> Any:
        # A copy by saved-tensor hooks is of no group: all parameters that it has get gradients.
        found = [(i, group) for i in flats if (group := FSDPParamGroup.of(args[i])) is not None]
        used = used_on_any_rank([group for _, group in found], outputs.fill(args))
        if all(used):
            return compiled(args)
        unused = frozenset(each.position for each, is_used in zip(outputs.gradients, used, strict=True) if not is_used)
        for i, group in found:
            # Gradients of earlier microbatches are reduced with this graph's: theirs are not zero.
            group.grads.unused = outputs.params_of(i, unused) - group.grads.pending_offsets
        try:
            made = list(compiled(args))
        finally:
            for _, group in found:
                group.grads.unused = frozenset()
        for i, sources in outputs.of_inputs.items():
            if sources <= unused:
                made[i] = None
        return made

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _output_gradient(node: fx.Node, position: int) -> OutputGradient:
    value = node.meta["val"]
    return OutputGradient(position, _layout(node), value.dtype, value.device)


def tell_backward(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps what AOTAutograd made of a graph so that its backward gets `None` for outputs that are not used."""

    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        leave_unused_undefined(args, outputs)
        return outputs

    return run
