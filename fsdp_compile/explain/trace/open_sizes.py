"""Graphs whose sizes are expressions of batch and sequence, and the same graphs with numbers in their place.

%n = sym_size(%x, 0); view(%x, [%n, 256])   ->   view(%x, [32, 256])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_compile._torch.tensors import FakeTensorMode
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.explain.trace.dims import SYMBOLS
from fsdp_compile.ir.graph import StepGraph

OPEN: Final = "open"
"""Key of a closed graph's `meta` for a node's value before sizes became numbers."""
Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool


@dataclasses.dataclass(frozen=True)
class Condition:
    """What a trace assumed about sizes, and the line of the model that made it."""

    holds: sympy.Basic
    where: str


@dataclasses.dataclass(frozen=True)
class OpenSizes:
    """How the symbols of a trace (`names`) follow from ours, and the conditions under which it is valid."""

    names: Mapping[sympy.Symbol, sympy.Symbol]
    conditions: tuple[Condition, ...]

    def expression(self, number: Any) -> Any:
        """A size as an expression of our symbols; numbers stay as they are."""
        return number.node.expr.xreplace(self.names) if isinstance(number, Symbolic) else number

    def number(self, number: Any, sizes: Mapping[str, int]) -> Any:
        """A size as the number that it has with given sizes.

        Raises:
            UnsupportedModelError: If it depends on data.
        """
        if not isinstance(number, Symbolic):
            return number
        value = self.expression(number).xreplace(_values(sizes))
        if value.free_symbols:
            raise UnsupportedModelError(
                f"the size {value} of a value in the graph depends on data",
                where="explain(dims=...)",
                instead="explain() without dims",
            )
        kinds: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
        return kinds[type(number)](value)

    def check(self, sizes: Mapping[str, int]) -> None:
        """Refuses sizes for which the traced graph is another one.

        Raises:
            ConfigError: With the condition, and the line of the model that made it.
        """
        for condition in self.conditions:
            if condition.holds.xreplace(_values(sizes)) == sympy.false:
                given = ", ".join(f"{name}={size}" for name, size in sizes.items())
                raise ConfigError(
                    f"the graph that was traced is for sizes with {condition.holds}, which {given} does not meet",
                    where=condition.where,
                    instead="explain() once more with inputs of that size",
                )


def open_sizes(names: Mapping[sympy.Symbol, sympy.Symbol], env: Any) -> OpenSizes:
    """Reads off the shape environment of a finished trace what it assumed.

    Raises:
        UnsupportedModelError: If only one size is possible, with the line of the model that fixes it.
    """
    found: dict[sympy.Basic, str] = {}
    for guard in env.guards:
        holds = guard.expr.xreplace(names)
        if holds != sympy.true:
            found.setdefault(holds, _user_line(guard))
    for holds, line in found.items():
        if isinstance(holds, sympy.Eq) and holds.lhs in names.values() and holds.rhs.is_number:
            raise UnsupportedModelError(
                f"{holds.lhs} is fixed to {holds.rhs} by the model",
                where=line,
                instead=f"code that works for every size there, or explain() without {str(holds.lhs)!r} among dims",
            )
    return OpenSizes(names, tuple(Condition(holds, line) for holds, line in found.items()))


def closed(step: StepGraph, sizes_of: OpenSizes, sizes: Mapping[str, int]) -> StepGraph:
    """A copy of a traced graph with numbers for all sizes, as tracing inputs of these sizes would have made it."""
    copied = step.copy()
    mode = FakeTensorMode()
    numbers: dict[fx.Node, Any] = {}
    with mode:
        for node in copied.graph.nodes:
            value = node.meta.get("val")
            node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: numbers.get(n, n))
            if isinstance(value, Symbolic):
                numbers[node] = sizes_of.number(value, sizes)
            elif any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
                node.meta[OPEN] = value
                node.meta["val"] = tree_map_only(torch.Tensor, lambda t: _closed(t, sizes_of, sizes), value)
    _drop_numbers(copied.output)
    for node in reversed(numbers):
        copied.graph.erase_node(node)
    return copied


def _closed(tensor: torch.Tensor, sizes_of: OpenSizes, sizes: Mapping[str, int]) -> torch.Tensor:
    shape, strides = ([sizes_of.number(n, sizes) for n in of] for of in (tensor.shape, tensor.stride()))
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)


def _drop_numbers(output: fx.Node) -> None:
    """Returns no sizes: a graph whose sizes are numbers saves none for backward."""
    returned: Iterable[Any] = output.args[0]  # type: ignore[assignment]
    notes = output.meta.get("desc") or [None] * len(list(returned))
    kept = [(value, note) for value, note in zip(returned, notes, strict=True) if not isinstance(value, int | float)]
    output.args = (tuple(value for value, _ in kept),)
    if output.meta.get("desc"):
        output.meta["desc"] = [note for _, note in kept]


def _values(sizes: Mapping[str, int]) -> dict[sympy.Basic, sympy.Basic]:
    return {SYMBOLS[name]: sympy.Integer(size) for name, size in sizes.items()}


def _user_line(guard: Any) -> str:
    """The line of the model that made a guard, or of torch if there is none."""
    return str(guard.sloc.maybe_user_loc or guard.sloc.framework_loc)
