"""Ranges in torch's profiler around the calls of a compiled graph that communicate.

Code of Inductor has no room for them, and needs none: it calls collectives and their waits through torch, in the order
of the graph (`written_order.py`). While a profiler runs, a dispatch mode sees each of these calls and puts it into the
range of the node whose turn it is. While none runs, there is nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compile._torch.autograd import profiler_runs
from fsdp_compile._torch.tensors import OpOverload
from fsdp_compile.ir.graph import Role, StepGraph, record_of
from fsdp_compile.layout.profiler_ranges import Range, profiled

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


def profiled_calls(step: StepGraph) -> tuple[ProfiledCall, ...]:
    """All calls of a transformed graph that communicate, in their order."""
    return tuple(call for node in step.graph.nodes if (call := _call(node)) is not None)


def ranges(calls: Sequence[ProfiledCall], names: Mapping[str, str]) -> AbstractContextManager[object]:
    """A context for one run of a graph: its calls have ranges if a profiler runs.

    Args:
        calls: Of the graph.
        names: The name of each unit by its title in the graph, which layers of one shape share.
    """
    return _Ranges(calls, names) if calls and profiler_runs() else nullcontext()


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
