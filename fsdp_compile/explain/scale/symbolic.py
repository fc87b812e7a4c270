"""Bytes and times of a plan as formulas of ranks, the rate of the link, batch and sequence."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Iterator

import sympy
import torch

from fsdp_compile.cost.communicate import COPIES, ROUNDS, Kind
from fsdp_compile.cost.compute import Work, node_work
from fsdp_compile.cost.formulas import collective_us, copy_us, share_of_others
from fsdp_compile.cost.fusion import plan_kernels
from fsdp_compile.cost.hardware import Device, make_link
from fsdp_compile.cost.memory import Holder, memory_of
from fsdp_compile.cost.step_memory import memory_of_step
from fsdp_compile.errors import ConfigError
from fsdp_compile.explain.plan_data import PlanData, Traced
from fsdp_compile.explain.report import Collective
from fsdp_compile.explain.scale.symbolic_memory import Sum, added_up, largest, live_sums
from fsdp_compile.explain.scale.symbolic_sizes import RANKS, OpenGraphSizes, extent, stored_dtypes
from fsdp_compile.explain.units import ParamData

__all__ = ["GB_PER_S", "RANKS", "Formulas", "formulas"]
GB_PER_S = sympy.Symbol("gb_per_s", positive=True)
"""What one rank sends in one direction, 1e9 byte/s."""
_FUNCTIONS = {
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


def formulas(plan: PlanData) -> Formulas:
    """See `Plan.formulas`.

    Raises:
        ConfigError: If the model has run, or its mesh has two dimensions or is a part of the world.
    """
    specs = [] if plan.traced is None else [param.spec for unit in plan.traced.units for param in unit.params]
    if plan.traced is None or any(
        spec.replicas > 1 or spec.post_forward_size > 1 or spec.size != plan.traced.world_size for spec in specs
    ):
        raise ConfigError(
            "formulas are made of a plan by explain() for a plain model on a 1-D mesh of all ranks",
            where="Plan.formulas()",
            instead="explain() the plain model before it is sharded",
        )
    if plan.traced.may_send_low_bits:
        raise ConfigError(
            "which parameters are sent in 8 bits depends on the number of ranks",
            where="Plan.formulas()",
            instead="explain() in a world of each size, or without gather_dtype",
        )
    every = [c for graph in plan.graphs for c in graph.collectives]
    if plan.sizes and any(c.kind is Kind.EXCHANGE for c in every):
        raise ConfigError(
            "how many rows of an embedding travel depends on the batch",
            where="Plan.formulas()",
            instead='explain() without dims, or with embedding="gathered"',
        )
    slots = {slot.name: slot for unit in plan.traced.units for slot in unit.params}
    link = make_link("open", GB_PER_S, "a symbol")
    sent = [_sent_bytes(c, slots) for c in every if c.kind not in COPIES]
    times = [
        collective_us(b, RANKS, launch_us=link.launch.value, hop_us=link.hop.value, bytes_per_s=link.bytes_per_s)
        for b in [*sent, *(0 for c in every if c.kind is Kind.EXCHANGE for _ in range(ROUNDS - 1))]
    ]
    held = [_extent(slot) * slot.stored.itemsize for slot in slots.values()]
    bus = plan.hardware.device.host
    copied = [sympy.Add(*_copied_bytes(c, slots)) for c in every if c.kind in COPIES]
    copies = [copy_us(b, launch_us=bus.launch.value, bytes_per_s=bus.bytes_per_s) for b in copied]
    return Formulas(
        shard_bytes=sympy.Add(*held),
        sent_bytes=sympy.Add(*sent),
        communication_us=sympy.Add(*times),
        copied_bytes=sympy.Add(*copied),
        copies_us=sympy.Add(*copies),
        **_of_graphs(plan, plan.traced),
    )


def _of_graphs(plan: PlanData, traced: Traced) -> dict[str, sympy.Expr]:
    """What follows from the nodes of graphs: FLOPs, their time, and memory."""
    work: Counter[Work] = Counter()
    saved: Sum = Counter()
    sums: list[Sum] = []
    kernels = {step.graph: plan_kernels(step.graph, traced.fusion) for steps in plan.steps for step in steps}
    memories = memory_of_step(plan.steps, lambda step: kernels[step.graph])
    stored = stored_dtypes(kernels)
    for steps, region, held in zip(plan.steps, traced.regions, memories, strict=True):
        sizes = OpenGraphSizes(region.sizes, stored, plan.world_size)
        for step, memory in zip(steps, held, strict=True):
            work.update(node_work(step.graph, kernels[step.graph], sizes).values())
            sums.extend(Counter(live) for live in live_sums(memory, sizes))
        if len(steps) > 1:
            *_, last = live_sums(memory_of(steps[0], kernels[steps[0].graph]), sizes, [Holder.SAVED])
            saved.update(last)
    device = plan.hardware.device
    times = [number * _time_us(one, device) for one, number in work.items()]
    return {
        "flops": sympy.Add(*(number * one.flops for one, number in work.items())),
        "compute_us": sympy.Add(*times),
        "saved_bytes": added_up(saved),
        "peak_bytes": largest(sums),
    }


def _sent_bytes(collective: Collective, slots: dict[str, ParamData]) -> sympy.Expr:
    if collective.kind is Kind.EXCHANGE:
        return sympy.expand(collective.size_bytes * share_of_others(RANKS))
    whole = sympy.Add(*_message_bytes(collective, slots)) * RANKS
    return sympy.expand(whole * share_of_others(RANKS))


def _message_bytes(collective: Collective, slots: dict[str, ParamData]) -> Iterator[sympy.Expr]:
    # Not the dtypes of units: a graph may read parameters in others, under `torch.autocast` and in eval mode.
    dtype: torch.dtype = getattr(torch, collective.dtype)
    return (_extent(slots[name]) * dtype.itemsize for name in collective.parameters)


def _copied_bytes(copy: Collective, slots: dict[str, ParamData]) -> Iterator[sympy.Expr]:
    """Bytes of a copy: in the dtype in which parameters are stored."""
    return (_extent(slots[name]) * slots[name].stored.itemsize for name in copy.parameters)


def _extent(slot: ParamData) -> sympy.Expr:
    return extent(slot.spec, slot.stored)


def _time_us(work: Work, device: Device) -> sympy.Expr:
    """The roofline of one kernel, as an open expression."""
    computing, moving = (
        sympy.sympify(amount) * 1e6 / rate
        for amount, rate in ((work.flops, device.flops_per_s(work.dtype)), (work.size_bytes, device.bytes_per_s))
    )
    if not (computing.free_symbols or moving.free_symbols):
        return max(computing, moving)
    return sympy.Max(computing, moving, evaluate=False) if computing else moving
