"""Dimensions of a model's inputs that stay open while it is traced (batch and sequence), and graphs with such sizes.

Their sizes become symbols of the trace, so that every size in a graph is an expression of them. Numbers take their
place before the passes:

    %n = sym_size(%x, 0); view(%x, [%n, 256])   ->   view(%x, [32, 256])
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import sympy
import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_compile._torch.dynamo import let_size_vary, symbol_of
from fsdp_compile._torch.tensors import FakeTensorMode
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.explain.stand_in import hollow
from fsdp_compile.ir.graph import StepGraph

SYMBOLS: Final = {name: sympy.Symbol(name, integer=True, positive=True) for name in ("batch", "sequence")}
"""Names that a dimension of the inputs can have, each with the symbol of its size."""
Dims = Mapping[str, int | Mapping[str, int]]
"""By name of a size, its dimension in every tensor argument that has so many, or in each argument that is named."""
T = TypeVar("T")
_LEAST = 2
"""Torch traces a size of 1 as a number; an open dimension is traced larger."""


@dataclasses.dataclass
class OpenInputs:
    """Hollow inputs of a trace, of which some dimensions are open.

    Attributes:
        sizes: By name, the sizes of the user's inputs.
        marked: By `id`, each tensor with open dimensions, and their names.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: dict[str, int]
    marked: dict[int, tuple[torch.Tensor, dict[int, str]]]

    def symbols(self, gm: fx.GraphModule, inputs: Sequence[object]) -> Iterator[tuple[sympy.Symbol, sympy.Symbol]]:
        """The symbols that Dynamo made for open dimensions in its example inputs, each with ours."""
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
            _, names = self.marked.get(id(value), (None, {}))
            for dim, name in names.items():
                symbol = symbol_of(node.meta["example_value"].shape[dim])
                if symbol is not None:
                    yield symbol, SYMBOLS[name]


def open_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dims: Dims) -> OpenInputs:
    """Makes the inputs of a model hollow, and opens some of their dimensions.

    Raises:
        ConfigError: For an unknown name, a dimension that no input has, or two sizes of one name.
    """
    for name in dims:
        if name not in SYMBOLS:
            raise ConfigError(
                f"there is no size {name!r}", where="explain(dims=...)", instead=" or ".join(map(repr, SYMBOLS))
            )
    positional = [*inspect.signature(model.forward).parameters][: len(args)]
    named = [*positional, *(f"argument {i}" for i in range(len(positional), len(args)))]
    sizes = {name: _size(name, [*zip(named, args, strict=True), *kwargs.items()], of) for name, of in dims.items()}
    marked: dict[int, tuple[torch.Tensor, dict[int, str]]] = {}

    def opened(argument: str, value: T) -> T:
        def one(tensor: torch.Tensor) -> torch.Tensor:
            found = {at: name for name, of in dims.items() if (at := _dimension(argument, tensor, of)) is not None}
            shape = [max(size, _LEAST) if at in found else size for at, size in enumerate(tensor.shape)]
            if shape != list(tensor.shape):
                tensor = torch.empty(shape, dtype=tensor.dtype, device="meta")
            traced = hollow(tensor)
            for at in found:
                let_size_vary(traced, at)
            if found:
                marked[id(traced)] = traced, found
            return traced

        made: T = tree_map_only(torch.Tensor, one, value)
        return made

    return OpenInputs(
        tuple(opened(name, value) for name, value in zip(named, args, strict=True)),
        {name: opened(name, value) for name, value in kwargs.items()},
        sizes,
        marked,
    )


def _dimension(argument: str, tensor: torch.Tensor, of: int | Mapping[str, int]) -> int | None:
    """Where in a tensor a named size is."""
    if isinstance(of, int):
        return of if 0 <= of < tensor.dim() else None
    return of.get(argument)


def _size(name: str, arguments: Iterable[tuple[str, Any]], of: int | Mapping[str, int]) -> int:
    """What all arguments that have a named size have there."""
    found: dict[str, int] = {}
    for argument, value in arguments:
        for tensor in tree_leaves(value):
            at = _dimension(argument, tensor, of) if isinstance(tensor, torch.Tensor) else None
            if at is not None and at >= tensor.dim():
                raise ConfigError(
                    f"{argument} has {tensor.dim()} dimensions",
                    where=f"explain(dims={{{name!r}: {{{argument!r}: {at}}}}})",
                    instead="the number of one of them, counted from 0",
                )
            if at is not None:
                found[argument] = tensor.shape[at]
    if len(set(found.values())) != 1:
        shown = ", ".join(f"{size} in {argument}" for argument, size in found.items()) or "no size at all"
        raise ConfigError(
            f"{name} is {shown}",
            where=f"explain(dims={{{name!r}: {of!r}}})",
            instead=f"only the arguments that have it, dims={{{name!r}: {{'input_ids': 1}}}}",
        )
    return next(iter(found.values()))


Symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
_PLAIN: Final[dict[type, type]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


@dataclasses.dataclass(frozen=True)
class OpenSizes:
    """What the sizes in a trace mean.

    Attributes:
        names: The symbols of the trace to ours; none, unless dimensions of the inputs are open.
        conditions: What the trace assumed about sizes, each with the line of the model that made it.
    """

    names: Mapping[sympy.Symbol, sympy.Symbol]
    conditions: Mapping[sympy.Basic, str]

    @classmethod
    def of(cls, names: Mapping[sympy.Symbol, sympy.Symbol], env: Any) -> OpenSizes:
        """Reads off the shape environment of a finished trace what it assumed.

        Raises:
            UnsupportedModelError: If only one size is possible, with the line of the model that fixes it.
        """
        found: dict[sympy.Basic, str] = {}
        for guard in env.guards if names else ():
            holds = guard.expr.xreplace(names)
            if holds != sympy.true:  # a line of torch, where none of the model made it
                found.setdefault(holds, str(guard.sloc.maybe_user_loc or guard.sloc.framework_loc))
        for holds, line in found.items():
            if isinstance(holds, sympy.Eq) and holds.lhs in names.values() and holds.rhs.is_number:
                raise UnsupportedModelError(
                    f"{holds.lhs} is fixed to {holds.rhs} by the model",
                    where=line,
                    instead=f"code that works for every size there, or explain() without {str(holds.lhs)!r} among dims",
                )
        return cls(names, found)

    def number(self, number: Any, sizes: Mapping[str, int]) -> Any:
        """A size as the number that it has with given sizes.

        Raises:
            UnsupportedModelError: If it depends on data.
        """
        if not isinstance(number, Symbolic):
            return number
        value = number.node.expr.xreplace(self.names).xreplace(_values(sizes))
        if value.free_symbols:
            raise UnsupportedModelError(
                f"the size {value} of a value in the graph depends on data",
                where="explain(dims=...)",
                instead="explain() without dims",
            )
        return _PLAIN[type(number)](value)

    def check(self, sizes: Mapping[str, int]) -> None:
        """Refuses sizes for which the traced graph is another one.

        Raises:
            ConfigError: With the condition, and the line of the model that made it.
        """
        for holds, line in self.conditions.items():
            if holds.xreplace(_values(sizes)) == sympy.false:
                given = ", ".join(f"{name}={size}" for name, size in sizes.items())
                raise ConfigError(
                    f"the graph that was traced is for sizes with {holds}, which {given} does not meet",
                    where=line,
                    instead="explain() once more with inputs of that size",
                )


def _values(sizes: Mapping[str, int]) -> dict[sympy.Basic, sympy.Basic]:
    return {SYMBOLS[name]: sympy.Integer(size) for name, size in sizes.items()}


def closed(step: StepGraph, sizes_of: OpenSizes, sizes: Mapping[str, int]) -> StepGraph:
    """A copy of a traced graph with numbers for all sizes, as tracing inputs of these sizes would have made it."""
    copied = step.copy()
    numbers: dict[fx.Node, Any] = {}

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        shape, strides = ([sizes_of.number(n, sizes) for n in of] for of in (tensor.shape, tensor.stride()))
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)

    with FakeTensorMode():
        for node in copied.graph.nodes:
            value = node.meta.get("val")
            node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: numbers.get(n, n))
            if isinstance(value, Symbolic):
                numbers[node] = sizes_of.number(value, sizes)
            elif any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
                node.meta["val"] = tree_map_only(torch.Tensor, resized, value)
    _drop_numbers(copied.output)
    for node in reversed(numbers):
        copied.graph.erase_node(node)
    return copied


def _drop_numbers(output: fx.Node) -> None:
    """Returns no sizes: a graph whose sizes are numbers saves none for backward."""
    returned: Iterable[Any] = output.args[0]  # type: ignore[assignment]
    notes = output.meta.get("desc") or [None] * len(list(returned))
    kept = [(value, note) for value, note in zip(returned, notes, strict=True) if not isinstance(value, int | float)]
    output.args = (tuple(value for value, _ in kept),)
    if output.meta.get("desc"):
        output.meta["desc"] = [note for _, note in kept]
