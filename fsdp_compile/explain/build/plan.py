"""From transformed graphs to the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.copies import copies_of
from fsdp_compile.cost.formulas import full_sharding_bytes, share_of_others
from fsdp_compile.cost.fusion import Fusion, Kernels, plan_kernels
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.memory import Memory
from fsdp_compile.cost.step_memory import memory_of_step
from fsdp_compile.cost.timeline import schedule
from fsdp_compile.explain.build.collectives import collectives, own_collectives
from fsdp_compile.explain.build.lower_bound import Outline, lower_bound, outline
from fsdp_compile.explain.build.memory import memory_curve, spans
from fsdp_compile.explain.build.skipped import skipped
from fsdp_compile.explain.plan_data import PlanData
from fsdp_compile.explain.report import GraphPlan, UnitPlan, Volume
from fsdp_compile.explain.units import ParamData, UnitData
from fsdp_compile.fsdp2.module_class import user_class
from fsdp_compile.ir.graph import Phase, Role, StepGraph, require
from fsdp_compile.layout.spec import Reshard, UnshardSpec
from fsdp_compile.layout.wire_formats import gathered_bytes


def build_plan(
    model: nn.Module,
    made: Sequence[UnitData],
    regions: Sequence[Sequence[StepGraph]],
    *,
    world_size: int,
    hardware: Hardware,
    fusion: Fusion,
) -> PlanData:
    """Reports on all graphs of a sharded model.

    Args:
        model: The sharded model.
        made: Its units.
        regions: For each compiled region its forward and, when training, its backward.
        world_size: Ranks.
        hardware: What times are estimated for.
        fusion: How the graphs are run.
    """
    names = frozenset(unit.title for unit in made)
    forwards: list[tuple[GraphPlan, Outline]] = []
    backwards: list[tuple[GraphPlan, Outline]] = []
    kernels = {step.graph: plan_kernels(step.graph, fusion) for steps in regions for step in steps}
    memories = memory_of_step(regions, lambda step: kernels[step.graph])
    for number, (steps, held) in enumerate(zip(regions, memories, strict=True)):
        for step, memory in zip(steps, held, strict=True):
            plan, least = _graph(step, number, memory, kernels[step.graph], hardware=hardware, names=names)
            (forwards if step.phase is Phase.FORWARD else backwards).append((plan, least))
    read = _specs_of_reads(regions)
    # Backward runs the regions in the opposite order.
    ordered = (*forwards, *reversed(backwards))
    graphs = tuple(plan for plan, _ in ordered)
    return PlanData(
        title=user_class(model).__name__,
        world_size=world_size,
        hardware=hardware,
        units=tuple(_unit(unit, read, training=bool(backwards)) for unit in made),
        graphs=graphs,
        volume=_volume(graphs, made, read),
        bound=lower_bound(graphs, [least for _, least in ordered]),
        skipped=tuple(skipped(model, made, graphs)),
    )


def _graph(
    step: StepGraph,
    region: int,
    memory: Memory,
    kernels: Kernels,
    *,
    hardware: Hardware,
    names: frozenset[str],
) -> tuple[GraphPlan, Outline]:
    scheduled = schedule(step, hardware, kernels)
    timeline = scheduled.timeline
    plan = GraphPlan(
        phase=step.phase,
        region=region,
        nodes=len(step.graph.nodes),
        flops=sum(cost.flops for cost in scheduled.costs.values()),
        compute_us=timeline.compute_us,
        communication_us=max(timeline.busy_us.values(), default=0.0),
        exposed_us=timeline.exposed_us,
        end_us=timeline.end_us,
        collectives=tuple(collectives(step, scheduled)),
        memory=memory_curve(step, memory, scheduled),
        spans=spans(step, scheduled, names),
        copies=tuple(copies_of(step, kernels)),
        own=tuple(own_collectives(step, scheduled)),
    )
    return plan, outline(step, scheduled.costs, hardware)


Reads = Mapping[str, Sequence[UnshardSpec]]
"""How graphs read parameters, by name; more than one way only where several graphs read one differently."""


def _specs_of_reads(regions: Sequence[Sequence[StepGraph]]) -> Reads:
    found: dict[str, dict[UnshardSpec, None]] = {}
    for node in (node for steps in regions for step in steps for node in step.nodes(Role.FULL)):
        record = require(node)
        found.setdefault(record.parameters[0], {})[record.specs[0]] = None
    return {name: list(specs) for name, specs in found.items()}


def _read_as(param: ParamData, read: Reads) -> Sequence[UnshardSpec]:
    """How graphs read a parameter: under `torch.autocast` not as its unit says."""
    return read.get(param.name, [param.spec])


def _unit(unit: UnitData, read: Reads, *, training: bool) -> UnitPlan:
    trained = [slot for slot in unit.params if slot.trained]
    least = sum(s.spec.numel * s.stored.itemsize / _ranks(s.spec) for s in unit.params)
    return UnitPlan(
        name=unit.title,
        parameters=len(list(unit.params)),
        numel=sum(slot.spec.numel for slot in unit.params),
        stored=_names(group.stored for group in unit.groups),
        sent=_names(spec.gather_format or spec.param_dtype for slot in unit.params for spec in _read_as(slot, read)),
        reduced=_names(slot.spec.reduce_dtype for slot in trained),
        full_bytes=unit.full_bytes,
        shard_bytes=unit.shard_bytes,
        padding_bytes=round(unit.shard_bytes - least),
        host_bytes=_host_bytes(unit, training=training),
    )


def _host_bytes(unit: UnitData, *, training: bool) -> int:
    offloaded = [group for group in unit.groups if group.params[0].spec.compute]
    return sum(group.shard_bytes * (1 + (training and group.trained)) for group in offloaded)


def _ranks(spec: UnshardSpec) -> int:
    """Ranks that share a parameter; every rank has all of a 0-d one."""
    return 1 if spec.dim is None else spec.size


def _names(dtypes: object) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))  # type: ignore[attr-defined]


def _volume(graphs: Sequence[GraphPlan], made: Sequence[UnitData], read: Reads) -> Volume:
    every = [collective for graph in graphs for collective in graph.collectives]
    sent = {kind: sum(c.sent_bytes for c in every if c.kind is kind) for kind in Kind}
    training = any(graph.phase is Phase.BACKWARD for graph in graphs)
    full = sum(
        min(
            _full_sharding(spec, spec.numel, trained=training and slot.trained, training=training)
            for spec in _read_as(slot, read)
        )
        for unit in made
        for slot in unit.params
    )
    return Volume({kind: size for kind, size in sent.items() if size}, full)


def _full_sharding(spec: UnshardSpec, numel: int, *, trained: bool, training: bool) -> float:
    gathers = 2 if training and spec.reshard is not Reshard.AFTER_BACKWARD else 1
    reduced = spec.reduce_dtype.itemsize if trained else 0
    sent = full_sharding_bytes(
        numel, spec.size, gathers=gathers, gathered_bytes=gathered_bytes(spec), reduced_bytes=reduced
    )
    if gathers == 2 and spec.post_forward_size > 1:
        # Backward gathers over fewer ranks, what was computed with.
        again = spec.param_dtype.itemsize * share_of_others(spec.post_forward_size)
        sent += (again - gathered_bytes(spec) * share_of_others(spec.size)) * numel
    return sent + 2 * reduced * numel / spec.size * share_of_others(spec.replicas)
