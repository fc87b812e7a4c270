"""Dimensions of a model's inputs that stay open while it is traced: batch and sequence.

Their sizes become symbols of the trace, so that every size in a graph is an expression of them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import sympy
import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_compile._torch.dynamo import let_size_vary, symbol_of
from fsdp_compile.errors import ConfigError
from fsdp_compile.explain.trace.stand_in import hollow

BATCH: Final = sympy.Symbol("batch", integer=True, positive=True)
"""Size of the dimension of inputs that is named "batch"."""
SEQUENCE: Final = sympy.Symbol("sequence", integer=True, positive=True)
"""Size of the dimension of inputs that is named "sequence"."""
SYMBOLS: Final = {"batch": BATCH, "sequence": SEQUENCE}
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
    made = OpenInputs((), {}, {}, {})
    positional = [*inspect.signature(model.forward).parameters][: len(args)]
    named = [*positional, *(f"argument {i}" for i in range(len(positional), len(args)))]
    sizes = _sizes(list(zip(named, args, strict=True)) + list(kwargs.items()), dims)
    made.sizes = {name: next(iter(found.values())) for name, found in sizes.items()}
    made.args = tuple(_opened(made, name, value, dims) for name, value in zip(named, args, strict=True))
    made.kwargs = {name: _opened(made, name, value, dims) for name, value in kwargs.items()}
    return made


def _dimension(argument: str, tensor: torch.Tensor, of: int | Mapping[str, int]) -> int | None:
    """Where in a tensor a named size is."""
    if isinstance(of, int):
        return of if 0 <= of < tensor.dim() else None
    return of.get(argument)


def _sizes(arguments: Sequence[tuple[str, Any]], dims: Dims) -> dict[str, dict[str, int]]:
    """For each named size, what each argument has there."""
    sizes: dict[str, dict[str, int]] = {name: {} for name in dims}
    for argument, value in arguments:
        for tensor in tree_leaves(value):
            for name, of in dims.items() if isinstance(tensor, torch.Tensor) else ():
                at = _dimension(argument, tensor, of)
                if at is not None and at >= tensor.dim():
                    raise ConfigError(
                        f"{argument} has {tensor.dim()} dimensions",
                        where=f"explain(dims={{{name!r}: {{{argument!r}: {at}}}}})",
                        instead="the number of one of them, counted from 0",
                    )
                if at is not None:
                    sizes[name][argument] = tensor.shape[at]
    for name, found in sizes.items():
        if len(set(found.values())) != 1:
            shown = ", ".join(f"{size} in {argument}" for argument, size in found.items()) or "no size at all"
            raise ConfigError(
                f"{name} is {shown}",
                where=f"explain(dims={{{name!r}: {dims[name]!r}}})",
                instead=f"only the arguments that have it, dims={{{name!r}: {{'input_ids': 1}}}}",
            )
    return sizes


def _opened(made: OpenInputs, argument: str, value: T, dims: Dims) -> T:
    def one(tensor: torch.Tensor) -> torch.Tensor:
        found = {at: name for name, of in dims.items() if (at := _dimension(argument, tensor, of)) is not None}
        traced = hollow(_at_least_two(tensor, found))
        for at in found:
            let_size_vary(traced, at)
        if found:
            made.marked[id(traced)] = traced, found
        return traced

    opened: T = tree_map_only(torch.Tensor, one, value)
    return opened


def _at_least_two(tensor: torch.Tensor, dims: Mapping[int, str]) -> torch.Tensor:
    shape = [max(size, _LEAST) if at in dims else size for at, size in enumerate(tensor.shape)]
    return tensor if list(tensor.shape) == shape else torch.empty(shape, dtype=tensor.dtype, device="meta")
