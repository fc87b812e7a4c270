"""Ranges in torch's profiler around the calls of a compiled graph that communicate.

Code of Inductor has no room for them, and needs none: it calls collectives and their waits through torch, in the order
of the graph (`written_order.py`). While a profiler runs, a dispatch mode sees each of these calls and puts it into the
range of the node whose turn it is. While none runs, there is nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compile._torch.autograd import profiler_runs
from fsdp_compile._torch.tensors import OpOverload
from fsdp_compile.ir.graph import Role, StepGraph, record_of
from fsdp_compile.layout.profiler_ranges import Range, profiled
from fsdp_compile.lower.wrappers import Compiled, flats_of
from fsdp_compile.runtime.units import FSDPParamGroup

_RANGES: Final = {
    Role.GATHER: Range.ALL_GATHER,
    Role.GATHER_WAIT: Range.ALL_GATHER_COPY_OUT,
    Role.REDUCE: Range.REDUCE,
    Role.REPLICATE: Range.REDUCE,
    Role.REDUCE_WAIT: Range.REDUCE_WAIT,
    Role.REPLICATE_WAIT: Range.REDUCE_WAIT,
}


@dataclasses.dataclass(frozen=True)
class ProfiledCall:
    """A call that communicates.

    Attributes:
        operator: Its full name.
        what: Its range; `None` for a collective of the program's own.
        units: Titles in the graph of the units that it is for.
    """

    operator: str
    what: Range | None
    units: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ProfiledCalls:
    """All calls of a graph that communicate.

    Attributes:
        calls: In their order.
        titles: The title in the graph of the unit of each flat parameter, by its position among the inputs.
    """

    calls: tuple[ProfiledCall, ...]
    titles: Mapping[int, str]

    @staticmethod
    def of(step: StepGraph) -> ProfiledCalls:
        """Those of a transformed graph."""
        calls = tuple(call for node in step.graph.nodes if (call := _call(node)) is not None)
        return ProfiledCalls(calls, {position: record.unit for position, record in flats_of(step)})

    def around(self, compiled: Compiled) -> Compiled:
        """Wraps the compiled graph so that its calls have ranges while a profiler runs."""

        def run(args: list[Any]) -> Any:
            if not profiler_runs():
                return compiled(args)
            with _Ranges(self.calls, self._names(args)):
                return compiled(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _names(self, args: Sequence[object]) -> dict[str, str]:
        """The name of each unit by its title in the graph, which layers of one shape share."""
        flats = [(title, args[position]) for position, title in self.titles.items()]
        groups = [(title, FSDPParamGroup.of(flat)) for title, flat in flats if isinstance(flat, torch.Tensor)]
        return {title: group.unit.name for title, group in groups if group is not None}


def _call(node: fx.Node) -> ProfiledCall | None:
    if not isinstance(node.target, OpOverload):
        return None
    record = record_of(node)
    what = None if record is None else _RANGES.get(record.role)
    if what is None and node.target.namespace != "_c10d_functional":
        return None
    return ProfiledCall(_name_of(node.target), what, () if record is None else record.units)


def _name_of(operator: Any) -> str:
    name: str = operator._schema.name
    return name.removesuffix("_")  # Inductor works in place where it can


class _Ranges(TorchDispatchMode):
    """Puts the calls of one run of a graph into their ranges."""

    supports_higher_order_operators = True

    def __init__(self, calls: Sequence[ProfiledCall], names: Mapping[str, str]) -> None:
        super().__init__()
        self._calls = calls
        self._next = 0
        self._watched = {call.operator for call in calls}
        self._names = names

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls an operator, in its range if it communicates."""
        kwargs = kwargs or {}
        call = self._turn_of(func)
        if call is None or call.what is None:
            return func(*args, **kwargs)
        with profiled(call.what, [self._names.get(unit, unit) for unit in call.units]):
            return func(*args, **kwargs)

    def _turn_of(self, func: Any) -> ProfiledCall | None:
        """The call of the graph that this one is; `None` for one that does not communicate, or has no place."""
        if not isinstance(func, OpOverload) or self._next == len(self._calls) or _name_of(func) not in self._watched:
            return None
        call = self._calls[self._next]
        self._next += 1
        return call if call.operator == _name_of(func) else None
