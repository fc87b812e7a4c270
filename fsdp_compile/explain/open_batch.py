"""A batch that stays open while a model is traced: one trace answers for all its sizes.

Dimension 0 of the inputs becomes a symbol of the trace, and sizes in a graph become expressions of it. A number takes
its place before the passes:

    %n = sym_size(%x, 0); view(%x, [%n, 256])   ->   view(%x, [32, 256])
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_compile._torch.dynamo import let_size_vary, symbol_of
from fsdp_compile._torch.tensors import FakeTensorMode
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.explain.stand_in import hollow
from fsdp_compile.ir.graph import StepGraph

_BATCH: Final = sympy.Symbol("batch", integer=True, positive=True)
_LEAST: Final = 2
"""Torch traces a size of 1 as a number; an open one is traced larger."""
_PLAIN: Final[dict[type, type]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


@dataclasses.dataclass
class Inputs:
    """Hollow inputs of a trace.

    Attributes:
        opened: By `id`, those whose dimension 0 is open.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    opened: Mapping[int, torch.Tensor]

    def symbols(self, gm: fx.GraphModule, examples: Sequence[object]) -> frozenset[sympy.Symbol]:
        """The symbols that Dynamo made for an open batch in its example inputs."""
        placeholders = zip(gm.graph.find_nodes(op="placeholder"), examples, strict=True)
        opened = [node.meta["example_value"] for node, value in placeholders if id(value) in self.opened]
        return frozenset(symbol for value in opened if (symbol := symbol_of(value.shape[0])) is not None)


def hollow_inputs(args: Sequence[Any], kwargs: Mapping[str, Any], *, open_batch: bool = False) -> Inputs:
    """Makes the inputs of a model hollow, and opens dimension 0 of all tensors among them if asked.

    Raises:
        ConfigError: If the batch is open, and not all tensors have the same size there.
    """
    given = (tuple(args), dict(kwargs))
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    sizes = dict.fromkeys(tensor.shape[0] for tensor in tensors)
    if open_batch and len(sizes) != 1:
        raise ConfigError(
            f"dimension 0 of the inputs, their batch, is {' and '.join(map(str, sizes)) or 'nowhere'}",
            where="plan(model, ...)",
            instead="tensors with the same number of samples",
        )
    opened: dict[int, torch.Tensor] = {}

    def made(tensor: torch.Tensor) -> torch.Tensor:
        if not (open_batch and tensor.dim()):
            return hollow(tensor)
        if tensor.shape[0] < _LEAST:
            shape = (_LEAST, *tensor.shape[1:])
            tensor = torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
        traced = hollow(tensor)
        let_size_vary(traced, 0)
        opened[id(traced)] = traced
        return traced

    hollow_args, hollow_kwargs = tree_map_only(torch.Tensor, made, given)
    return Inputs(hollow_args, hollow_kwargs, opened)


@dataclasses.dataclass(frozen=True)
class OpenBatch:
    """The batch of a trace.

    Attributes:
        symbols: Of the trace; none unless it is open.
        env: The shape environment of the trace.
    """

    symbols: frozenset[sympy.Symbol]
    env: Any

    @functools.cached_property
    def conditions(self) -> Mapping[sympy.Basic, str]:
        """What the finished trace assumed about it, each with the line of the model that made it.

        Raises:
            UnsupportedModelError: If only one size is possible, with the line of the model that fixes it.
        """
        found: dict[sympy.Basic, str] = {}
        for guard in self.env.guards if self.symbols else ():
            holds = guard.expr.xreplace(dict.fromkeys(self.symbols, _BATCH))
            line = str(guard.sloc.maybe_user_loc or guard.sloc.framework_loc)  # of torch, where none of the model is
            if isinstance(holds, sympy.Eq) and holds.lhs == _BATCH and holds.rhs.is_number:
                raise UnsupportedModelError(
                    f"the batch is fixed to {holds.rhs} by the model",
                    where=line,
                    instead="code that works for every size there",
                )
            if holds != sympy.true:
                found.setdefault(holds, line)
        return found

    def check(self, batch: int) -> None:
        """Raises `ConfigError` for a batch for which the traced graph is another one."""
        for holds, line in self.conditions.items():
            if holds.xreplace({_BATCH: sympy.Integer(batch)}) == sympy.false:
                raise ConfigError(
                    f"the graph that was traced is for sizes with {holds}, which batch={batch} does not meet",
                    where=line,
                    instead="another number of tokens per step",
                )

    def number(self, size: Any, batch: int) -> Any:
        """A size as the number that it is with a batch."""
        if type(size) not in _PLAIN:
            return size
        value = size.node.expr.xreplace(dict.fromkeys(self.symbols, sympy.Integer(batch)))
        if value.free_symbols:
            raise UnsupportedModelError(
                f"the size {value} of a value in the graph depends on data",
                where="plan(model, ...)",
                instead="explain() for a configuration that is chosen",
            )
        return _PLAIN[type(size)](value)

    def closed(self, step: StepGraph, batch: int) -> StepGraph:
        """A copy of a graph with numbers for all sizes, as tracing inputs with this batch would have made it."""
        copied = step.copy()
        numbers: dict[fx.Node, Any] = {}

        def resized(tensor: torch.Tensor) -> torch.Tensor:
            shape, strides = ([self.number(n, batch) for n in of] for of in (tensor.shape, tensor.stride()))
            return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)

        with FakeTensorMode():
            for node in copied.graph.nodes:
                value = node.meta.get("val")
                node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: numbers.get(n, n))
                if type(value) in _PLAIN:
                    numbers[node] = self.number(value, batch)
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
