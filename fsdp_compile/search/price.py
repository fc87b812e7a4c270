"""What one way to shard a model costs: its time, and its memory by the units that run, from graphs traced once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from fsdp_compile.cost.compute import node_costs
from fsdp_compile.cost.fusion import Kernels, plan_kernels
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.memory import Holder, Memory, memory_of_step
from fsdp_compile.cost.timeline import schedule
from fsdp_compile.explain.rescale import Sharding, Traced
from fsdp_compile.explain.units import UnitData, unit_plan
from fsdp_compile.ir.graph import Phase, StepGraph, record_of
from fsdp_compile.ir.queries import module_of, read_text, unit_of
from fsdp_compile.layout.spec import parse
from fsdp_compile.ops.unshard import REDUCE_GRAD, UNSHARD
from fsdp_compile.options import FSDPOptions
from fsdp_compile.search.depth import Stack

_PER_BLOCK: Final = (Holder.SHARD, Holder.SHARD_GRADIENT, Holder.SAVED, Holder.INPUT, Holder.OUTPUT)
"""Memory that more blocks take more of. What is gathered and computed with at once is that of a few neighbours."""

Held = Mapping[Holder, float]
Segment = tuple[Phase, str]
"""A unit of a graph, see `Stack.segment`."""


@dataclasses.dataclass(frozen=True)
class Price:
    """Forward and backward of one micro-batch on one rank.

    Attributes:
        time_us: Until compute and all links are done.
        compute_us: Computing alone.
        flops: Floating-point operations.
        shard_bytes: Sharded parameters, padding included.
        trained_bytes: Those of them that have gradients and optimizer state.
        host_bytes: Of shards and gradients in host memory.
        memory: For each unit, what is held at its own peak.
    """

    time_us: float
    compute_us: float
    flops: float
    shard_bytes: float
    trained_bytes: float
    host_bytes: float
    memory: Mapping[Segment, Held]

    @property
    def at_peak(self) -> Held:
        """What is held where most is."""
        return max(self.memory.values(), key=lambda held: sum(held.values()), default={})

    def most(self, holder: Holder) -> float:
        """The most that is held for one purpose at any peak."""
        return max((held.get(holder, 0.0) for held in self.memory.values()), default=0.0)

    @property
    def peak_bytes(self) -> float:
        """The largest sum of live bytes."""
        return sum(self.at_peak.values())


@dataclasses.dataclass(frozen=True)
class Between:
    """How numbers go on from two numbers of blocks to a third one.

    Attributes:
        few: The smaller number of blocks.
        more: The larger one.
        blocks: That the model has.
    """

    few: int
    more: int
    blocks: int

    def grow(self, few: float, more: float) -> float:
        """A number that is the same for each further block."""
        return few + (more - few) * (self.blocks - self.few) / (self.more - self.few)

    def price(self, few: Price, more: Price, *, kept_share: float) -> Price:
        """The price of the whole model, of whose gathered parameters a share is kept for backward."""
        grows = (*_PER_BLOCK, *((Holder.UNSHARDED,) if kept_share else ()))
        most = {holder: self.grow(few.most(holder), more.most(holder)) for holder in grows}

        def held(a: Held, b: Held) -> Held:
            kept = {holder: max(a.get(holder, 0), b.get(holder, 0)) for holder in dict.fromkeys((*a, *b))}
            for holder in (holder for holder in grows if holder in kept):
                grown = self.grow(a.get(holder, 0), b.get(holder, 0))
                # A unit's peak may be at another node with more blocks: early in one graph, and late in the other.
                kept[holder] = min(max(0.0, grown), most[holder])
            return kept

        both = [segment for segment in few.memory if segment in more.memory]
        memory = {segment: held(few.memory[segment], more.memory[segment]) for segment in both}
        names = [field.name for field in dataclasses.fields(Price) if field.name != "memory"]
        return Price(memory=memory, **{name: self.grow(getattr(few, name), getattr(more, name)) for name in names})


def price(
    traced: Traced,
    sharding: Sharding,
    batch: int | None,
    hardware: Hardware,
    options: FSDPOptions,
    stack: tuple[Stack, int] | None,
) -> Price:
    """Runs the passes for a sharding, and estimates time and memory of the result.

    Args:
        traced: For all ranks of a 1-D mesh.
        sharding: How parameters are shared.
        batch: Its size, where it is open.
        hardware: What times are estimated for.
        options: Of the passes.
        stack: Like blocks, and how many of them were traced.

    Raises:
        ConfigError: If the model has another graph for such a batch.
    """
    regions, units = traced.resharded(sharding, batch, hardware, options)
    kernels = {step.graph: plan_kernels(step.graph, traced.fusion) for steps in regions for step in steps}
    memories = memory_of_step(regions, lambda step: kernels[step.graph])
    titles = frozenset(unit.title for unit in units)
    found: dict[Segment, Held] = {}
    scheduled = []
    for steps, held in zip(regions, memories, strict=True):
        for step, memory in zip(steps, held, strict=True):
            scheduled.append(schedule(step, hardware, kernels[step.graph]))
            for segment, live in _segments(step, memory, titles, stack):
                if sum(live.values()) > sum(found.get(segment, {}).values()):
                    found[segment] = live
    shown = [unit_plan(unit, {}, training=any(len(steps) > 1 for steps in regions)) for unit in units]
    return Price(
        time_us=sum(each.timeline.end_us for each in scheduled),
        compute_us=sum(each.timeline.compute_us for each in scheduled),
        flops=sum(cost.flops for each in scheduled for cost in each.costs.values()),
        shard_bytes=sum(unit.shard_bytes for unit in shown),
        trained_bytes=sum(_trained_bytes(unit) for unit in units),
        host_bytes=sum(unit.host_bytes for unit in shown),
        memory=found,
    )


def computing_us(traced: Traced, batch: int | None, hardware: Hardware) -> float:
    """Computing alone of the graphs before the passes, which only add copies to it."""
    graphs = [step.graph for steps in traced.closed_at(batch) for step in steps]
    kernels: list[Kernels] = [plan_kernels(graph, traced.fusion) for graph in graphs]
    costs = [node_costs(graph, hardware, of) for graph, of in zip(graphs, kernels, strict=True)]
    return sum(cost.time_us for each in costs for cost in each.values())


def _segments(
    step: StepGraph, memory: Memory, titles: frozenset[str], stack: tuple[Stack, int] | None
) -> Iterator[tuple[Segment, Held]]:
    """For each node its unit, and what is live while it runs; a node of no known unit belongs to the one before it.

    What units around the blocks compute before the middle of the blocks and after it are two segments: memory there
    differs in another way.
    """
    live = {holder: memory.live_bytes([holder]) for holder in Holder}
    where, first_half, is_after = "", None, False
    for place, node in enumerate(step.graph.nodes):
        where = unit_of(module_of(node), titles) or where
        name, half = (where, None) if stack is None else stack[0].segment(where, stack[1])
        if half is None:
            name += ", after the blocks" * is_after
        elif node.op == "call_function" and record_of(node) is None:  # collectives run ahead
            first_half = half if first_half is None else first_half
            is_after = is_after or half is not first_half
        yield (step.phase, name), {holder: bytes_[place] for holder, bytes_ in live.items() if bytes_[place]}


def _trained_bytes(unit: UnitData) -> int:
    """Bytes of the flat parameters on one rank that have gradients."""
    trained = [flat for flat in unit.flats if any(param.trained for param in flat)]
    return sum(max(p.spec.offset + p.spec.extent for p in flat) * flat[0].stored.itemsize for flat in trained)


@dataclasses.dataclass(frozen=True)
class Sent:
    """Bytes of all full parameters that a step sends, in the dtypes of computing and of reductions.

    Attributes:
        gathered: That forward gathers.
        again: That backward gathers again, if none is kept.
        reduced: Of gradients.
    """

    gathered: float
    again: float
    reduced: float


def sent_bytes(traced: Traced) -> Sent:
    """What graphs gather and reduce before the passes; rows that are looked up where they are do not count."""
    sums = dict.fromkeys(("gathered", "again", "reduced"), 0.0)
    for steps in (region.captured for region in traced.regions):
        for step in steps:
            gathers = "gathered" if step.phase is Phase.FORWARD else "again"
            for target, name in ((UNSHARD, gathers), (REDUCE_GRAD, "reduced")):
                found = {(n.args[0], read_text(n)) for n in step.graph.find_nodes(op="call_function", target=target)}
                for spec in (parse(text) for _, text in found):
                    dtype = spec.param_dtype if target is UNSHARD else spec.reduce_dtype
                    sums[name] += spec.numel * dtype.itemsize
    return Sent(**sums)


def stored_bytes(units: Sequence[UnitData]) -> tuple[float, float]:
    """Bytes of all full parameters as they are stored, and of those that have gradients."""
    params = [(param.spec.numel * param.stored.itemsize, param.trained) for unit in units for param in unit.params]
    return sum(size for size, _ in params), sum(size for size, trained in params if trained)
