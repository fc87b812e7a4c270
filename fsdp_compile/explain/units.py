"""The parameters of a sharded model, unit by unit, and what each unit takes: in memory, and on the link."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch

from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.hardware import share_of_others
from fsdp_compile.explain.report import GraphPlan, UnitPlan, Volume
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.fsdp2.unit import Model
from fsdp_compile.ir.graph import Phase, Role, StepGraph, require
from fsdp_compile.layout.spec import Reshard, UnshardSpec
from fsdp_compile.layout.wire_formats import gathered_bytes


@dataclasses.dataclass(frozen=True)
class ParamData:
    """One sharded parameter.

    Attributes:
        name: From the root of its model.
        spec: Where it lies there, and how it is gathered and reduced.
        stored: Dtype of its shard.
        trained: Whether it is to have a gradient.
    """

    name: str
    spec: UnshardSpec
    stored: torch.dtype
    trained: bool


@dataclasses.dataclass(frozen=True)
class UnitData:
    """A unit; `title` as in graphs, and its parameters by the flat buffers that they lie in."""

    title: str
    flats: tuple[tuple[ParamData, ...], ...]

    @property
    def params(self) -> tuple[ParamData, ...]:
        """All of its parameters."""
        return tuple(param for flat in self.flats for param in flat)


def units_of(model: Model) -> tuple[UnitData, ...]:
    """The units of a model that have parameters, in the order of their modules."""

    def flat_of(group: ParamGroup) -> tuple[ParamData, ...]:
        stored = group.flat.dtype
        return tuple(ParamData(p.name, p.spec, stored, p.parameter.requires_grad) for p in group.params)

    return tuple(UnitData(unit.title, tuple(map(flat_of, unit.groups))) for unit in model.units if unit.groups)


def flat_numel(specs: Iterable[UnshardSpec]) -> int:
    """Elements on one rank of the flat buffer in which parameters lie."""
    return max(spec.offset + spec.extent for spec in specs)


def _flat_bytes(flat: Sequence[ParamData]) -> int:
    return flat_numel(param.spec for param in flat) * flat[0].stored.itemsize


Reads = Mapping[str, Sequence[UnshardSpec]]
"""How graphs read parameters, by name: under `torch.autocast` not as units say, and several graphs may differ."""


def reads_of(regions: Sequence[Sequence[StepGraph]]) -> Reads:
    """The reads of all graphs."""
    found: dict[str, dict[UnshardSpec, None]] = {}
    for node in (node for steps in regions for step in steps for node in step.nodes(Role.FULL)):
        record = require(node)
        found.setdefault(record.parameters[0], {})[record.specs[0]] = None
    return {name: list(specs) for name, specs in found.items()}


def unit_plan(unit: UnitData, read: Reads, *, training: bool) -> UnitPlan:
    """What a unit takes on one rank."""
    sent = [spec for param in unit.params for spec in read.get(param.name, [param.spec])]
    shard_bytes = sum(map(_flat_bytes, unit.flats))
    # Every rank has all of a 0-d parameter.
    split = [(param, 1 if param.spec.dim is None else param.spec.size) for param in unit.params]
    least = sum(param.spec.numel * param.stored.itemsize / ranks for param, ranks in split)
    offloaded = [flat for flat in unit.flats if flat[0].spec.compute]
    return UnitPlan(
        name=unit.title,
        parameters=len(unit.params),
        numel=sum(param.spec.numel for param in unit.params),
        stored=_names(flat[0].stored for flat in unit.flats),
        sent=_names(spec.gather_format or spec.param_dtype for spec in sent),
        reduced=_names(param.spec.reduce_dtype for param in unit.params if param.trained),
        full_bytes=sum(param.spec.numel * param.stored.itemsize for param in unit.params),
        shard_bytes=shard_bytes,
        padding_bytes=round(shard_bytes - least),
        host_bytes=sum(_flat_bytes(flat) * (1 + (training and any(p.trained for p in flat))) for flat in offloaded),
    )


def _names(dtypes: Iterable[object]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))


def volume(graphs: Sequence[GraphPlan], units: Sequence[UnitData], read: Reads) -> Volume:
    """What one rank sends in a step, and what gathering everything twice and reducing it once would."""
    every = [collective for graph in graphs for collective in graph.collectives]
    sent = {kind: sum(c.sent_bytes for c in every if c.kind is kind) for kind in Kind}
    training = any(graph.phase is Phase.BACKWARD for graph in graphs)
    full = sum(
        min(
            _full_sharding(spec, trained=param.trained, training=training)
            for spec in read.get(param.name, [param.spec])
        )
        for unit in units
        for param in unit.params
    )
    return Volume({kind: size for kind, size in sent.items() if size}, full)


def _full_sharding(spec: UnshardSpec, *, trained: bool, training: bool) -> float:
    gathers = 2 if training and spec.reshard is not Reshard.AFTER_BACKWARD else 1
    reduced = spec.reduce_dtype.itemsize if training and trained else 0
    sent = (gathers * gathered_bytes(spec) + reduced) * spec.numel * share_of_others(spec.size)
    if gathers == 2 and spec.post_forward_size > 1:
        # Backward gathers over fewer ranks, what was computed with.
        again = spec.param_dtype.itemsize * share_of_others(spec.post_forward_size)
        sent += (again - gathered_bytes(spec) * share_of_others(spec.size)) * spec.numel
    return sent + 2 * reduced * spec.numel / spec.size * share_of_others(spec.replicas)
