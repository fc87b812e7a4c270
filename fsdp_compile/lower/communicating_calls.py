"""The calls of a compiled graph that communicate: their ranges in torch's profiler, and which of them has failed.

Code of Inductor has no room for ranges, and needs none: it calls collectives and their waits through torch, in the
order of the graph (`written_order.py`). While a profiler runs, a dispatch mode sees each of these calls and puts it
into the range of the node whose turn it is. While none runs, there is nothing.

Where a collective fails, the error names what a rank has waited for. A graph that runs operator by operator says at
which node it failed; of Inductor's code the line is known.
"""

from __future__ import annotations

import dataclasses
import linecache
import re
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compile._torch.autograd import profiler_runs
from fsdp_compile._torch.distributed import collectives
from fsdp_compile._torch.tensors import OpOverload
from fsdp_compile.ir.graph import Role, record_of
from fsdp_compile.layout.profiler_ranges import Range, profiled

_NODE = re.compile(r"While executing %(\w+)")
_LINE = re.compile(r"^[^#]*\bwait_tensor\.default\(")
_KINDS = {
    Role.GATHER_WAIT: "the all-gather of",
    Role.REDUCE_WAIT: "the reduce-scatter of gradients of",
    Role.REPLICATE_WAIT: "the all-reduce over replicas of gradients of",
}
_RANGES: Final = {
    Role.GATHER: Range.ALL_GATHER,
    Role.GATHER_WAIT: Range.ALL_GATHER_COPY_OUT,
    Role.REDUCE: Range.REDUCE,
    Role.REPLICATE: Range.REDUCE,
    Role.REDUCE_WAIT: Range.REDUCE_WAIT,
    Role.REPLICATE_WAIT: Range.REDUCE_WAIT,
}


@dataclasses.dataclass(frozen=True)
class CommunicatingCall:
    """A call that communicates.

    Attributes:
        node: Its name in the graph.
        what: Its range; `None` for a collective of the program's own.
        units: Titles in the graph of the units that it is for.
        waits_for: Of a wait, what errors say that a rank has waited for; else empty.
    """

    node: str
    operator: str
    what: Range | None
    units: tuple[str, ...]
    waits_for: str


def ranges(calls: Sequence[CommunicatingCall], names: Mapping[str, str]) -> AbstractContextManager[object]:
    """A context for one run of a graph: its calls have ranges if a profiler runs.

    Layers of one shape share a graph, and the titles of units in it; `names` has those of this run by title.
    """
    return _Ranges(calls, names) if calls and profiler_runs() else nullcontext()


def communicating_call(node: fx.Node) -> CommunicatingCall | None:
    """What a node of a transformed graph communicates; `None` if it does not."""
    if not isinstance(node.target, OpOverload):
        return None
    record = record_of(node)
    what = None if record is None else _RANGES.get(record.role)
    if what is None and node.target.namespace != "_c10d_functional":
        return None
    waits_for = ""
    if node.target is collectives.wait_tensor.default:
        waits_for = "a collective of the program"
        if record is not None and record.role in _KINDS:
            waits_for = f"{_KINDS[record.role]} {', '.join(record.parameters)}"
    units = () if record is None else record.units
    return CommunicatingCall(node.name, _name_of(node.target), what, units, waits_for)


def _name_of(operator: Any) -> str:
    name: str = operator._schema.name
    return name.removesuffix("_")  # Inductor works in place where it can


def failed_wait(error: BaseException, calls: Sequence[CommunicatingCall]) -> str | None:
    """Which of the waits of a graph an error comes from that it has raised; `None` where that is not known."""
    waits = {call.node: call.waits_for for call in calls if call.waits_for}
    node = _NODE.search(str(error))
    if node is not None:
        return waits.get(node[1])
    for frame, number in traceback.walk_tb(error.__traceback__):
        lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
        numbers = [i for i, line in enumerate(lines, 1) if _LINE.search(line)]
        if number in numbers and len(numbers) == len(waits):
            return list(waits.values())[numbers.index(number)]
    return None


class _Ranges(TorchDispatchMode):
    """Puts the calls of one run of a graph into their ranges."""

    supports_higher_order_operators = True

    def __init__(self, calls: Sequence[CommunicatingCall], names: Mapping[str, str]) -> None:
        super().__init__()
        self._left = list(calls[::-1])
        self._watched = {call.operator for call in calls}
        self._names = names

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls an operator, in its range if it communicates."""
        kwargs = kwargs or {}
        if self._left and isinstance(func, OpOverload) and (name := _name_of(func)) in self._watched:
            call = self._left.pop()
            if call.operator == name and call.what is not None:
                with profiled(call.what, [self._names.get(unit, unit) for unit in call.units]):
                    return func(*args, **kwargs)
        return func(*args, **kwargs)
