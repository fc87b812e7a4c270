"""Bytes and times of a plan as formulas of ranks, the rate of the link, batch and sequence.

Nodes of the model have the expressions of the trace. Those that passes inserted have a record: so many elements per
rank for each slot, on one rank or on all. The peak of memory is the largest of the sums that can be the largest.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from operator import getitem
from typing import TYPE_CHECKING, Any, Final

import sympy
import torch
from torch import fx

from fsdp_compile.cost.communicate import COPIES, ROUNDS, Kind
from fsdp_compile.cost.compute import Work, node_work
from fsdp_compile.cost.formulas import share_of_others
from fsdp_compile.cost.fusion import plan_kernels
from fsdp_compile.cost.hardware import Device, make_link
from fsdp_compile.cost.memory import Buffer, Holder, Memory, memory_of, memory_of_step
from fsdp_compile.cost.sizes import Sizes, tensor_bytes, tensors_of, tensors_of_value
from fsdp_compile.errors import ConfigError
from fsdp_compile.explain.open_sizes import OPEN, OpenSizes
from fsdp_compile.ir.graph import Record, Role, record_of, require, role_of
from fsdp_compile.layout.flat_layout import aligned_numel
from fsdp_compile.layout.spec import UnshardSpec

if TYPE_CHECKING:
    from fsdp_compile.explain.plan import Plan
    from fsdp_compile.explain.rescale import Traced

RANKS: Final = sympy.Symbol("ranks", integer=True, positive=True)
"""Ranks that share the parameters, N."""
GB_PER_S: Final = sympy.Symbol("gb_per_s", positive=True)
"""What one rank sends in one direction, 1e9 byte/s."""
_FUNCTIONS: Final = {
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "CeilDiv": lambda a, b: -(-a // b),
}
"""Functions of sizes that torch adds to sympy's."""


@dataclasses.dataclass(frozen=True)
class Formulas:
    """Expressions in `RANKS`, `GB_PER_S`, and of open dimensions in `BATCH` and `SEQUENCE`.

    They include padding, to whole rows per rank and to aligned slots. They apply to the buckets and the order of the
    plan that they were made of: with very many ranks, slices become small and another plan may pack more of them
    together. Waits follow from a schedule, not from a formula: `Plan.at` plans again.

    Attributes:
        shard_bytes: Sharded parameters of one rank.
        sent_bytes: What one rank sends in a step.
        communication_us: Time of all collectives, one after the other.
        copied_bytes: Copies between host and device in a step, both directions together.
        copies_us: Time of all those copies, one after the other.
        flops: Floating-point operations of one rank in a step.
        compute_us: Time of all computing.
        saved_bytes: What forward saves for backward.
        peak_bytes: The largest sum of live bytes.
    """

    shard_bytes: sympy.Expr
    sent_bytes: sympy.Expr
    communication_us: sympy.Expr
    copied_bytes: sympy.Expr
    copies_us: sympy.Expr
    flops: sympy.Expr
    compute_us: sympy.Expr
    saved_bytes: sympy.Expr
    peak_bytes: sympy.Expr

    def at(self, **sizes: float) -> dict[str, float]:
        """Numbers for given `ranks`, `gb_per_s`, `batch` and `sequence`.

        Raises:
            ConfigError: If a symbol of a formula is missing, or a given name is in none.
        """
        expressions = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        symbols = {str(s): s for expression in expressions.values() for s in expression.free_symbols}
        if set(sizes) != set(symbols):
            raise ConfigError(
                f"the formulas are of {', '.join(sorted(symbols))}, and not of {', '.join(sorted(sizes)) or 'nothing'}",
                where="Formulas.at(...)",
                instead=f"Formulas.at({', '.join(f'{name}=...' for name in sorted(symbols))})",
            )
        # As Python: sympy's own substitution takes many seconds for a long maximum.
        compute = sympy.lambdify([symbols[name] for name in sizes], list(expressions.values()), [_FUNCTIONS, "math"])
        return dict(zip(expressions, map(float, compute(*sizes.values())), strict=True))


def formulas(plan: Plan, traced: Traced) -> Formulas:
    """See `Plan.formulas`."""
    every = [c for graph in plan.graphs for c in graph.collectives]
    if plan.sizes and any(c.kind is Kind.EXCHANGE for c in every):
        raise ConfigError(
            "the number of embedding rows to exchange depends on the batch",
            where="Plan.formulas()",
            instead='explain() without dims, or with embedding="gathered"',
        )
    slots = {slot.name: slot for unit in traced.units for slot in unit.params}
    extents = {name: _extent(slot.spec, slot.stored) for name, slot in slots.items()}
    link, bus = make_link("open", GB_PER_S, "a symbol"), plan.hardware.device.host

    def sent_bytes(collective: Any) -> sympy.Expr:
        if collective.kind is Kind.EXCHANGE:
            return sympy.expand(collective.size_bytes * share_of_others(RANKS))
        # Not the dtypes of units: a graph may read parameters in others, under `torch.autocast` and in eval mode.
        dtype: torch.dtype = getattr(torch, collective.dtype)
        whole = sympy.Add(*(extents[name] * dtype.itemsize for name in collective.parameters)) * RANKS
        return sympy.expand(whole * share_of_others(RANKS))

    sent = [sent_bytes(c) for c in every if c.kind not in COPIES]
    times = [
        link.formula_us(b, RANKS, link.bytes_per_s)
        for b in [*sent, *(0 for c in every if c.kind is Kind.EXCHANGE for _ in range(ROUNDS - 1))]
    ]
    held = {name: extent * slots[name].stored.itemsize for name, extent in extents.items()}
    copied = [sympy.Add(*(held[name] for name in c.parameters)) for c in every if c.kind in COPIES]
    return Formulas(
        shard_bytes=sympy.Add(*held.values()),
        sent_bytes=sympy.Add(*sent),
        communication_us=sympy.Add(*times),
        copied_bytes=sympy.Add(*copied),
        copies_us=sympy.Add(*map(bus.copy_us, copied)),
        **_of_graphs(plan, traced),
    )


def _of_graphs(plan: Plan, traced: Traced) -> dict[str, sympy.Expr]:
    """What follows from the nodes of graphs: FLOPs, their time, and memory."""
    work: Counter[Work] = Counter()
    saved: Sum = Counter()
    sums: list[Sum] = []
    kernels = {step.graph: plan_kernels(step.graph, traced.fusion) for steps in plan.steps for step in steps}
    memories = memory_of_step(plan.steps, lambda step: kernels[step.graph])
    flats = [n for graph in kernels for n in graph.find_nodes(op="placeholder") if role_of(n) is Role.FLAT]
    stored = {claim: n.meta["val"].dtype for n in flats for claim in require(n).claims}
    for steps, region, held in zip(plan.steps, traced.regions, memories, strict=True):
        sizes = _GraphSizes(region.sizes, stored, plan.world_size)
        for step, memory in zip(steps, held, strict=True):
            work.update(node_work(step.graph, kernels[step.graph], sizes).values())
            sums.extend(Counter(live) for live in _live(memory, sizes))
        if len(steps) > 1:
            *_, last = _live(memory_of(steps[0], kernels[steps[0].graph]), sizes, [Holder.SAVED])
            saved.update(last)
    device = plan.hardware.device
    return {
        "flops": sympy.Add(*(number * one.flops for one, number in work.items())),
        "compute_us": sympy.Add(*(number * _time_us(one, device) for one, number in work.items())),
        "saved_bytes": _added_up(saved),
        "peak_bytes": _largest(sums),
    }


def _time_us(work: Work, device: Device) -> sympy.Expr:
    """The roofline of one kernel, as an open expression."""
    computing = sympy.sympify(work.flops) * 1e6 / device.flops_per_s(work.dtype)
    moving = sympy.sympify(work.size_bytes) * 1e6 / device.bytes_per_s
    if not (computing.free_symbols or moving.free_symbols):
        return max(computing, moving)
    return sympy.Max(computing, moving, evaluate=False) if computing else moving


def _extent(spec: UnshardSpec, stored: torch.dtype) -> sympy.Expr:
    """Elements of a parameter's slot on each rank, as `layout/flat_layout.py` rounds them; `stored` is of its flat."""
    return _rounded(spec.shape, spec.dim, aligned_numel(stored, spec.param_dtype, spec.reduce_dtype))


@functools.cache
def _rounded(shape: tuple[int, ...], dim: int | None, step: int) -> sympy.Expr:
    if dim is None:
        return sympy.Integer(step)
    others = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    numel = sympy.ceiling(sympy.Integer(shape[dim]) / RANKS) * others
    return step * sympy.Max(sympy.ceiling(numel / step), 1)


class _GraphSizes(Sizes):
    """Sizes of one region's graphs as expressions."""

    def __init__(self, sizes_of: OpenSizes, stored: Mapping[tuple[str, str], torch.dtype], ranks: int) -> None:
        """Reads sizes.

        Args:
            sizes_of: What the symbols of the trace mean.
            stored: Dtype of the flat parameter of each parameter, by unit and name.
            ranks: For which the graphs were planned.
        """
        self._sizes_of = sizes_of
        self._stored = stored
        self._ranks = ranks
        self._known: dict[fx.Node, list[Any]] = {}

    def values(self, value: Any) -> Any:
        """What formulas of FLOPs are given for an argument: a fake tensor with open sizes."""
        return value.meta.get(OPEN, value.meta.get("val")) if isinstance(value, fx.Node) else value

    def number(self, size: Any) -> Any:
        """One size."""
        return self._sizes_of.expression(size)

    def pieces(self, node: fx.Node) -> list[Any]:
        """Bytes of each tensor among a node's results."""
        if node not in self._known:
            self._known[node] = self._pieces(node)
        return self._known[node]

    def _pieces(self, node: fx.Node) -> list[Any]:
        record = record_of(node)
        if record is None:
            tensors = tensors_of_value(self.values(node))
            return [sympy.expand(tensor_bytes(tensor, self.number)) for tensor in tensors]
        items = {
            user.args[1]: record_of(user) for user in node.users if user.target is getitem and role_of(user) in _ITEMS
        }
        tensors = tensors_of(node)
        known = items if len(tensors) > 1 else {}
        return [self._of_slots(known.get(i) or record, tensor) for i, tensor in enumerate(tensors)]

    def _of_slots(self, record: Record, tensor: torch.Tensor) -> Any:
        """Bytes of a tensor of ours: slots on one rank, slots on all ranks, or a full parameter."""
        here = tensor_bytes(tensor)
        slots = zip(record.claims, record.specs, strict=True)
        one = sympy.Add(*(_extent(spec, self._stored[claim]) for claim, spec in slots)) * tensor.element_size()
        on_one = one.subs(RANKS, self._ranks)
        if here == on_one:
            return one
        return sympy.expand(one * RANKS) if here == on_one * self._ranks else sympy.Integer(here)


_ITEMS: Final = (Role.GATHER_ITEM, Role.REDUCE_ITEM)
Sum = Counter[Any]
"""A sum as coefficients by what they multiply, such as `batch*sequence`; nothing in it is ever negative."""


def _live(memory: Memory, sizes: Sizes, holders: Iterable[Holder] = Holder) -> Iterator[Sum]:
    """The sum of live bytes of `holders` while each node runs."""
    wanted = frozenset(holders)
    born: dict[int, list[Buffer]] = {}
    gone: dict[int, list[Buffer]] = {}
    for buffer in memory.buffers:
        if buffer.holder in wanted and buffer.size_bytes:
            born.setdefault(buffer.first, []).append(buffer)
            gone.setdefault(buffer.last + 1, []).append(buffer)

    def terms(buffer: Buffer) -> Sum:
        return Counter(sympy.sympify(sizes.pieces(buffer.node)[buffer.result]).as_coefficients_dict())

    live: Sum = Counter()
    for position in range(memory.length):
        for buffer in gone.get(position, ()):
            live.subtract(terms(buffer))
        for buffer in born.get(position, ()):
            live.update(terms(buffer))
        yield +live if position in born else live


def _largest(sums: Iterable[Sum]) -> sympy.Expr:
    """The largest of some sums; a sum that another one exceeds in every term is left out."""
    kept: list[Sum] = []
    for one in sums:
        if not any(one <= other for other in kept):
            kept = [other for other in kept if not other <= one] + [one]
    added = [_added_up(one) for one in kept]
    return sympy.Max(*added, evaluate=False) if len(added) > 1 else sympy.Add(*added)


def _added_up(terms: Sum) -> sympy.Expr:
    return sympy.Add(*(coefficient * term for term, coefficient in terms.items()))
