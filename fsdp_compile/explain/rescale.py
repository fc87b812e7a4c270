"""A plan for other ranks, another link or another batch, from graphs that were traced once.

Before the passes, the number of ranks that share a parameter is in the text of its reads, and nowhere else in a graph
(one rank leaves out what makes messages smaller: to and from one rank, such graphs are refused). So the texts are
rewritten, the flat parameters get their new sizes, and the passes run again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fsdp_compile.cost.fusion import Fusion
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.memory import bytes_beside
from fsdp_compile.errors import BudgetTooSmallError, ConfigError
from fsdp_compile.explain.build import build_plan
from fsdp_compile.explain.plan import Plan
from fsdp_compile.explain.trace import TracedRegion
from fsdp_compile.explain.units import UnitData, flat_numel
from fsdp_compile.ir.graph import KEY, Role, StepGraph, require, role_of
from fsdp_compile.ir.queries import GRADIENTS_OF_READS, TEXT_POSITION, read_text
from fsdp_compile.layout import flat_layout
from fsdp_compile.layout.spec import Reshard, UnshardSpec
from fsdp_compile.layout.wire_formats import FORMATS
from fsdp_compile.ops.embedding import LOOK_UP
from fsdp_compile.ops.unshard import UNSHARD
from fsdp_compile.options import FSDPOptions
from fsdp_compile.partition.auto_reshard import keep_all, keep_parts
from fsdp_compile.partition.cast_before_gather import casts_of
from fsdp_compile.pipeline import keep, transform

aten = torch.ops.aten
_RECOMPUTED = (
    "how many blocks are computed again in backward for the budget was chosen when the model was traced, for {} ranks"
)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a plan shares parameters, where it is made from graphs that were traced for all ranks of a 1-D mesh.

    Attributes:
        ranks: That share each parameter, neighbours in the world.
        replicas: Groups of such ranks, each of which has all parameters.
        reshard: When gathered parameters are freed; `None` for as they were traced, and for a choice, graphs must have
            been traced with `Reshard.AUTO`.
        compute: Type of the device that computes, if shards are in host memory; else empty.
        post_forward: Ranks that together keep each gathered parameter for backward; 1 if none do.
        gather_format: Name of the format in which large parameters are gathered; empty for their dtype.
    """

    ranks: int
    replicas: int = 1
    reshard: Reshard | None = None
    compute: str = ""
    post_forward: int = 1
    gather_format: str = ""

    def of(self, spec: UnshardSpec, offset: int, extent: int, stored: torch.dtype) -> UnshardSpec:
        """A read of a parameter under this sharding."""
        more: dict[str, Any] = {}
        if self.replicas > 1:
            more |= {"replicas": self.replicas, "replicate_group": "fsdp.replicate.0", "replicate_stride": self.ranks}
        if self.post_forward > 1:
            more |= {"post_forward_size": self.post_forward, "post_forward_group": "fsdp.post_forward.0"}
        if self.gather_format and flat_layout.is_large(spec.shape, spec.dim, self.ranks, stored):
            more["gather_format"] = self.gather_format
        # Parameters are kept by an edit of both graphs, which are traced as if that were open.
        freed = self.reshard is Reshard.AFTER_FORWARD
        return dataclasses.replace(
            spec,
            offset=offset,
            extent=extent,
            size=self.ranks,
            reshard=Reshard.AFTER_FORWARD if freed else spec.reshard,
            compute=self.compute or spec.compute,
            **more,
        )


@dataclasses.dataclass(frozen=True)
class Traced:
    """What plans are made of: the stand-in that was traced, its units and regions, and the settings of the compile."""

    model: nn.Module
    units: tuple[UnitData, ...]
    regions: tuple[TracedRegion, ...]
    world_size: int
    options: FSDPOptions
    fusion: Fusion

    def planned(self, ranks: int, planned_for: Hardware) -> Plan:
        """Runs the passes on the traced graphs, rewritten for so many ranks.

        Raises:
            ConfigError: If the model has other graphs there.
        """
        elsewhere = ranks != self.world_size
        if ranks < 1:
            raise ConfigError(f"there are no {ranks} ranks", where="Plan.at(world_size=...)", instead="1, 2, ...")
        for reason in self._other_graphs(ranks) if elsewhere else ():
            raise self._refusal(reason, ranks)
        try:
            steps, units = self.resharded(Sharding(ranks) if elsewhere else None, None, planned_for, self.options)
        except BudgetTooSmallError as error:
            if not self.options.may_recompute or not elsewhere:
                raise
            raise self._refusal(_RECOMPUTED.format(self.world_size), ranks) from error
        return self.plan(steps, units, ranks, planned_for)

    def resharded(
        self, sharding: Sharding | None, batch: int | None, planned_for: Hardware, options: FSDPOptions
    ) -> tuple[list[list[StepGraph]], Sequence[UnitData]]:
        """Runs the passes on copies of the traced graphs.

        They are rewritten for a sharding; `None` for that of the trace. `batch` is the size of an open one.

        Returns:
            For each region its graphs after the passes, and the units with their parameters so sharded.

        Raises:
            ConfigError: For a batch with which the traced graph is another one, or a budget that no schedule keeps.
        """
        units: Sequence[UnitData] = self.units
        regions = self.closed_at(batch)
        if sharding is not None:
            units = [_resized(unit, sharding) for unit in units]
            for step in (step for steps in regions for step in steps):
                _rewrite(step, sharding)
        # A fixed schedule refuses an option that it does not use.
        for_graphs = planned_for if options.prefetch == "auto" else None
        options = dataclasses.replace(options, artifacts=None, hardware=for_graphs)
        made = []
        for steps, region in zip(regions, self.regions, strict=True):
            if len(steps) > 1:
                forward, backward = steps
                if sharding is not None and sharding.reshard is Reshard.AFTER_BACKWARD:
                    keep_all(forward, backward)
                if sharding is not None and sharding.post_forward > 1:
                    keep_parts(forward, backward)
                backward.beside_bytes = bytes_beside(forward, backward)
                keep(forward, backward, options, whole=region.whole)
            made.append([transform(step, options) for step in steps])
        return made, units

    def closed_at(self, batch: int | None) -> list[list[StepGraph]]:
        """Copies of the traced graphs before the passes, for this size of an open batch."""
        if batch is None:
            return [[step.copy() for step in region.captured] for region in self.regions]
        for region in self.regions:
            region.batch.check(batch)  # another size may need another graph, which only a new trace can make
        return [[region.batch.closed(step, batch) for step in region.captured] for region in self.regions]

    def plan(
        self, regions: Sequence[Sequence[StepGraph]], units: Sequence[UnitData], ranks: int, planned_for: Hardware
    ) -> Plan:
        """Reports on graphs after the passes, with the units as they are on so many ranks."""
        fusion = self.fusion
        made = build_plan(self.model, units, regions, world_size=ranks, hardware=planned_for, fusion=fusion)
        return dataclasses.replace(made, traced=self, steps=tuple(map(tuple, regions)))

    def _refusal(self, reason: str, ranks: int) -> ConfigError:
        where = f"Plan.at(world_size={ranks}) of a plan for {self.world_size}"
        return ConfigError(reason, where=where, instead="explain() once more in a world of that size, with its mesh")

    def _other_graphs(self, ranks: int) -> Iterator[str]:
        """Why the plan for so many ranks does not follow from what was traced."""
        params = [param for unit in self.units for param in unit.params]
        if (self.world_size == 1) != (ranks == 1):
            one = "one rank has another graph than several: "
            if self.options.embedding == "sharded":
                yield f'{one}embedding="sharded" looks rows up on other ranks'
            if self._casts_before_gathers():
                yield f"{one}parameters that are cast where they are read, as in torch.autocast, are cast before"
        if any(region.recomputed for region in self.regions):
            yield _RECOMPUTED.format(self.world_size)
        gather_dtype = getattr(self.options.mp_policy, "gather_dtype", None)
        if gather_dtype is not None or any(param.spec.gather_format for param in params):
            yield "which parameters are sent in 8 bits depends on the number of ranks"
        for name, spec in ((param.name, param.spec) for param in params):
            if spec.size != self.world_size or spec.post_forward_size > 1:
                kept = f", and kept over {spec.post_forward_size}" if spec.post_forward_size > 1 else ""
                over = f"{spec.size} of {self.world_size} ranks{kept}"
                yield f"{name} is sharded over {over}, and one number does not say how both change"
            if spec.dim and spec.shape[spec.dim] % ranks:
                size = spec.shape[spec.dim]
                yield f"dimension {spec.dim} of size {size} of {name} does not divide over {ranks} ranks"

    def _casts_before_gathers(self) -> bool:
        own = {slot.name: slot.spec.param_dtype for unit in self.units for slot in unit.params}
        steps = [step for region in self.regions for step in region.captured]
        records = [require(node) for step in steps for node in step.nodes(Role.FLAT)]
        sent = [pair for record in records for pair in zip(record.parameters, record.specs, strict=True)]
        reads = [node for step in steps for node in step.graph.find_nodes(op="call_function", target=UNSHARD)]
        cast_before = any(spec.param_dtype.itemsize < own[name].itemsize for name, spec in sent)
        return cast_before or any(casts_of(read) for read in reads)


def _laid_out(specs: Mapping[str, UnshardSpec], stored: torch.dtype, sharding: Sharding) -> dict[str, UnshardSpec]:
    """The reads of a flat parameter, in the order of registration, if it is sharded so."""
    first = next(iter(specs.values()))
    places = flat_layout.plan_layout(
        [flat_layout.shard_numel(spec.shape, spec.dim, sharding.ranks) for spec in specs.values()],
        stored=stored,
        sent=first.param_dtype,
        reduced=first.reduce_dtype,
        per_byte=FORMATS[sharding.gather_format].per_byte if sharding.gather_format else 0,
    )
    return {name: sharding.of(specs[name], *place, stored) for name, place in zip(specs, places, strict=True)}


def _resized(unit: UnitData, sharding: Sharding) -> UnitData:
    """A unit of the same parameters, sharded so."""
    flats = []
    for flat in unit.flats:
        specs = _laid_out({param.name: param.spec for param in flat}, flat[0].stored, sharding)
        flats.append(tuple(dataclasses.replace(param, spec=specs[param.name]) for param in flat))
    return UnitData(unit.title, tuple(flats))


def _rewrite(step: StepGraph, sharding: Sharding) -> None:
    """Rewrites a graph before the passes for another sharding."""
    texts: dict[fx.Node, dict[str, str]] = {}
    like_flats: dict[fx.Node, int] = {}
    for node in step.graph.nodes:
        if role_of(node) is Role.FLAT:
            record = require(node)
            before = dict(zip(record.parameters, record.specs, strict=True))
            after = _laid_out(before, node.meta["val"].dtype, sharding)
            specs = tuple(after[name] for name in record.parameters)  # in the order of registration
            node.meta[KEY] = dataclasses.replace(record, specs=specs)
            texts[node] = {before[name].text: spec.text for name, spec in after.items()}
            like_flats[node] = flat_numel(after.values())
        elif node.target in (UNSHARD, LOOK_UP, *GRADIENTS_OF_READS):
            node.update_arg(TEXT_POSITION[node.target], texts[node.args[0]][read_text(node)])
        if node.target in GRADIENTS_OF_READS or (node.target is aten.add.Tensor and set(node.args) <= set(like_flats)):
            like_flats[node] = like_flats[node.args[0]]
    for node, numel in like_flats.items():
        node.meta["val"] = node.meta["val"].new_empty(numel)
