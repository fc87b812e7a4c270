"""What one way to shard a model costs: its time, and its memory by the units that run, from graphs traced once.

A deep model of like blocks is traced and priced with few of them, and what follows is exact per block.

model      embedding, block 0 ... block 125, head
traced     embedding, block 0 ... block 3, head     and once more with 8 blocks: their difference is that of 4 blocks
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from torch import nn

from fsdp_compile.cost.compute import node_costs
from fsdp_compile.cost.fusion import plan_kernels
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.memory import Holder, Memory, memory_of_step
from fsdp_compile.cost.timeline import schedule
from fsdp_compile.explain.rescale import Sharding, Traced
from fsdp_compile.explain.stand_in import stand_in
from fsdp_compile.explain.units import unit_plan
from fsdp_compile.ir.graph import Phase, StepGraph, record_of
from fsdp_compile.ir.queries import module_of, read_text, unit_of
from fsdp_compile.layout.spec import parse
from fsdp_compile.ops.unshard import REDUCE_GRAD, UNSHARD
from fsdp_compile.options import FSDPOptions

DEPTHS: Final = (4, 8)
"""Numbers of blocks with which a deep model is traced: the last units of forward are kept, the first ones gathered."""
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
        flops: Floating-point operations.
        trained_bytes: Sharded parameters that have gradients and optimizer state, padding included.
        host_bytes: Of shards and gradients in host memory.
        memory: For each unit, what is held at its own peak.
    """

    time_us: float
    flops: float
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
class Stack:
    """Like blocks of a model that run one after the other.

    Attributes:
        name: Path of the `ModuleList` or `Sequential` that has them.
        blocks: How many there are.
    """

    name: str
    blocks: int

    def segment(self, unit: str, blocks: int) -> tuple[str, bool | None]:
        """A unit in a model with so many blocks: its name, and of a block, whether it is in the second half.

        Blocks of the second half are counted from the end.
        """
        number, _, rest = unit.removeprefix(f"{self.name}.").partition(".")
        if not unit.startswith(f"{self.name}.") or not number.isdecimal():
            return unit, None
        if int(number) < blocks / 2:
            return f"{self.name}.{number}.{rest}", False
        return f"{self.name}.{int(number) - blocks}.{rest}", True

    def grow(self, few: float, more: float) -> float:
        """A number of the model, from those with the `DEPTHS` of blocks: each further block adds the same."""
        return few + (more - few) * (self.blocks - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])

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


def stack_of(model: nn.Module) -> Stack | None:
    """The longest list of like blocks in a model, if it is longer than what would be traced of it."""
    found = [
        Stack(name, len(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > max(DEPTHS) and _are_alike([*module])
    ]
    return max(found, key=lambda stack: stack.blocks, default=None)


def shortened(model: nn.Module, stack: Stack, blocks: int) -> nn.Module:
    """A copy of a model without values that has only the first blocks; the model is only read."""
    copied = stand_in(model)
    held: Any = copied.get_submodule(stack.name)
    del held[blocks:]
    return copied


def _are_alike(blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks differ in their values at most, or in numbers that are their places."""
    described = [_described(block) for block in blocks]
    if any(one.keys() != described[0].keys() for one in described):
        return False
    columns = ([one[name] for one in described] for name in described[0])
    places = [*range(len(blocks))]
    return all(column == places or all(value == column[0] for value in column) for column in columns)


def _described(block: nn.Module) -> Mapping[str, Any]:
    """Classes, shapes and plain settings of all modules of a block."""
    found: dict[str, Any] = {}
    for path, module in block.named_modules():
        found[path] = type(module)
        plain = {
            name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str | None)
        }
        found |= {f"{path}:{name}": value for name, value in plain.items()}
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        found[f"{name} of"] = (tensor.shape, tensor.dtype, tensor.requires_grad)
    return found


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
    training = any(len(steps) > 1 for steps in regions)
    return Price(
        time_us=sum(each.timeline.end_us for each in scheduled),
        flops=sum(cost.flops for each in scheduled for cost in each.costs.values()),
        trained_bytes=sum(
            max(p.spec.offset + p.spec.extent for p in flat) * flat[0].stored.itemsize
            for unit in units
            for flat in unit.flats
            if any(param.trained for param in flat)
        ),
        host_bytes=sum(unit_plan(unit, {}, training=training).host_bytes for unit in units),
        memory=found,
    )


def computing_us(traced: Traced, batch: int | None, hardware: Hardware) -> float:
    """Computing alone of the graphs before the passes, which only add copies to it."""
    graphs = [step.graph for steps in traced.closed_at(batch) for step in steps]
    costs = (node_costs(graph, hardware, plan_kernels(graph, traced.fusion)) for graph in graphs)
    return sum(cost.time_us for each in costs for cost in each.values())


def _segments(
    step: StepGraph, memory: Memory, titles: frozenset[str], stack: tuple[Stack, int] | None
) -> Iterator[tuple[Segment, Held]]:
    """For each node its unit, and what is live while it runs; a node of no known unit belongs to the one before it.

    What units around the blocks compute before the middle of the blocks and after it are two segments: memory there
    differs in another way.
    """
    live = {holder: memory.live_bytes([holder]) for holder in Holder}
    where, first_is_late, is_after = "", None, False
    for place, node in enumerate(step.graph.nodes):
        where = unit_of(module_of(node), titles) or where
        name, is_late = (where, None) if stack is None else stack[0].segment(where, stack[1])
        if is_late is None:
            name += ", after the blocks" * is_after
        elif node.op == "call_function" and record_of(node) is None:  # collectives run ahead
            first_is_late = is_late if first_is_late is None else first_is_late
            is_after = is_after or is_late is not first_is_late
        yield (step.phase, name), {holder: bytes_[place] for holder, bytes_ in live.items() if bytes_[place]}


@dataclasses.dataclass(frozen=True)
class FullBytes:
    """Bytes of all full parameters as they are stored, and as a step sends them in the dtypes of the policy.

    Attributes:
        stored: As they are stored.
        trained: Those of them that have gradients.
        gathered: That forward gathers.
        again: That backward gathers again, if none is kept.
        reduced: Of gradients.
    """

    stored: float
    trained: float
    gathered: float
    again: float
    reduced: float


def full_bytes(traced: Traced) -> FullBytes:
    """What graphs gather and reduce before the passes; rows that are looked up where they are do not count."""
    params = [(p.spec.numel * p.stored.itemsize, p.trained) for unit in traced.units for p in unit.params]
    sent = dict.fromkeys(("gathered", "again", "reduced"), 0.0)
    for step in (step for region in traced.regions for step in region.captured):
        gathers = "gathered" if step.phase is Phase.FORWARD else "again"
        for target, name in ((UNSHARD, gathers), (REDUCE_GRAD, "reduced")):
            found = {(n.args[0], read_text(n)) for n in step.graph.find_nodes(op="call_function", target=target)}
            for spec in (parse(text) for _, text in found):
                dtype = spec.param_dtype if target is UNSHARD else spec.reduce_dtype
                sent[name] += spec.numel * dtype.itemsize
    return FullBytes(sum(size for size, _ in params), sum(size for size, trained in params if trained), **sent)
