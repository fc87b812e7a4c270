"""A plan for other ranks, another link or other sizes of the inputs, from graphs that were traced once.

Before the passes, the number of ranks that share a parameter is in the text of its reads, and nowhere else in a graph
(one rank leaves out what makes messages smaller: to and from one rank, such graphs are refused). So the texts are
rewritten, the flat parameters get their new sizes, and the passes run again. Sizes of inputs are symbols in such a
graph; numbers replace them before the passes (`trace/open_sizes.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn

from fsdp_compile.cost.hardware import Hardware, hardware
from fsdp_compile.cost.memory import bytes_beside
from fsdp_compile.errors import BudgetTooSmallError, ConfigError
from fsdp_compile.explain.build.plan import build_plan
from fsdp_compile.explain.plan_data import PlanData, Traced
from fsdp_compile.explain.scale.other_ranks import refuse_ranks, refuse_to_recompute
from fsdp_compile.explain.trace.dims import SYMBOLS
from fsdp_compile.explain.trace.open_sizes import closed
from fsdp_compile.explain.units import GroupData, UnitData
from fsdp_compile.ir.graph import KEY, Role, StepGraph, require, role_of
from fsdp_compile.ir.queries import GRADIENTS_OF_READS, TEXT_POSITION, read_text
from fsdp_compile.layout import flat_layout
from fsdp_compile.layout.spec import UnshardSpec
from fsdp_compile.ops.embedding import LOOK_UP
from fsdp_compile.ops.unshard import UNSHARD
from fsdp_compile.options import FSDPOptions
from fsdp_compile.pipeline import keep, transform

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a traced model is planned for."""

    world_size: int
    sizes: Mapping[str, int]
    hardware: Hardware


def rescaled(
    plan: PlanData, *, world_size: int | None, gb_per_s: float | None, sizes: Mapping[str, int | None]
) -> PlanData:
    """See `Plan.at`."""
    traced = plan.traced
    if traced is None:
        raise ConfigError(
            "the plan is of a model that has run, on the ranks that there were",
            where="Plan.at(...)",
            instead="explain() the plain model before it is sharded",
        )
    given = {name: size for name, size in sizes.items() if size is not None}
    _refuse_sizes(plan, given)
    ranks = plan.world_size if world_size is None else world_size
    link = plan.hardware.link if gb_per_s is None else hardware(link=gb_per_s).link
    there = dataclasses.replace(plan.hardware, link=link)
    return plan_at(traced, Setting(ranks, {**plan.sizes, **given}, there))


def plan_at(traced: Traced, setting: Setting) -> PlanData:
    """Runs the passes on traced graphs, rewritten for a setting.

    Raises:
        ConfigError: If the model has other graphs in that setting.
    """
    units: Sequence[UnitData] = traced.units
    regions = [[closed(step, of.sizes, setting.sizes) for step in of.steps] for of in traced.regions]
    for region in traced.regions:
        # Another size may need another graph, which only a new trace can make.
        region.sizes.check(setting.sizes)
    if setting.world_size != traced.world_size:
        refuse_ranks(traced, setting.world_size)
        order = _order(traced.model)
        units = [_resized(unit, order, setting.world_size) for unit in traced.units]
        for step in (step for steps in regions for step in steps):
            _rewrite(step, order, setting.world_size)
    # A fixed schedule refuses an option that it does not use.
    planned_for = setting.hardware if traced.options.prefetch == "auto" else None
    options = dataclasses.replace(traced.options, artifacts=None, hardware=planned_for)
    try:
        done = [_transformed(steps, options, whole=of.whole) for steps, of in zip(regions, traced.regions, strict=True)]
    except BudgetTooSmallError as error:
        if not setting.sizes:  # reports with open sizes compute nothing again, on no ranks
            refuse_to_recompute(traced, setting.world_size, error)
        raise
    return plan_of(traced, units, done, setting)


def plan_of(
    traced: Traced, units: Sequence[UnitData], regions: Sequence[Sequence[StepGraph]], setting: Setting
) -> PlanData:
    """Reports on graphs after the passes, with the units as they are in this setting."""
    made = build_plan(
        traced.model,
        units,
        regions,
        world_size=setting.world_size,
        hardware=setting.hardware,
        fusion=traced.fusion,
    )
    steps = tuple(map(tuple, regions))
    return dataclasses.replace(made, sizes=dict(setting.sizes), traced=traced, steps=steps)


def _refuse_sizes(plan: PlanData, given: Mapping[str, int]) -> None:
    for name, size in given.items():
        if name not in plan.sizes:
            raise ConfigError(
                f"{name} was a number when the model was traced",
                where=f"Plan.at({name}={size})",
                instead=f'explain(..., dims={{"{name}": {list(SYMBOLS).index(name)}}}): the dimension of inputs '
                "that it is",
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"{name} cannot be {size!r}", where=f"Plan.at({name}=...)", instead="1, 2, ...")


def _transformed(steps: Sequence[StepGraph], options: FSDPOptions, *, whole: bool) -> list[StepGraph]:
    if len(steps) > 1:
        forward, backward = steps
        backward.beside_bytes = bytes_beside(forward, backward)
        keep(forward, backward, options, whole=whole)
    return [transform(step, options) for step in steps]


Order = Mapping[str, int]
"""Place of each parameter of a model in the order of registration, which is that of layouts."""


def _order(model: nn.Module) -> Order:
    return {name: index for index, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}


def _laid_out(
    specs: Mapping[str, UnshardSpec], order: Order, stored: torch.dtype, ranks: int
) -> dict[str, UnshardSpec]:
    """The reads of a flat parameter that is sharded over so many ranks, by offset."""
    names = sorted(specs, key=lambda name: order.get(name, len(order)))
    first = specs[names[0]]
    shapes = [flat_layout.ParameterShape(name, specs[name].shape, specs[name].dim) for name in names]
    planned = flat_layout.plan_layout(
        shapes, size=ranks, stored=stored, sent=first.param_dtype, reduced=first.reduce_dtype
    )
    return {
        names[place.index]: dataclasses.replace(
            specs[names[place.index]], offset=place.offset, extent=place.extent, size=ranks
        )
        for place in planned.slots
    }


def _numel(specs: Mapping[str, UnshardSpec]) -> int:
    """Elements of a flat parameter."""
    return max(spec.offset + spec.extent for spec in specs.values())


def _resized(unit: UnitData, order: Order, ranks: int) -> UnitData:
    """A unit of the same parameters over so many ranks."""
    return dataclasses.replace(unit, groups=tuple(_resized_group(group, order, ranks) for group in unit.groups))


def _resized_group(group: GroupData, order: Order, ranks: int) -> GroupData:
    specs = _laid_out({param.name: param.spec for param in group.params}, order, group.stored, ranks)
    placed = tuple(dataclasses.replace(param, spec=specs[param.name]) for param in group.params)
    return dataclasses.replace(group, numel=_numel(specs), params=placed)


def _rewrite(step: StepGraph, order: Order, ranks: int) -> None:
    """Rewrites a graph before the passes for so many ranks."""
    texts: dict[fx.Node, dict[str, str]] = {}
    like_flats: dict[fx.Node, int] = {}
    for node in step.graph.nodes:
        if role_of(node) is Role.FLAT:
            record = require(node)
            before = dict(zip(record.parameters, record.specs, strict=True))
            after = _laid_out(before, order, node.meta["val"].dtype, ranks)
            specs = tuple(after[name] for name in record.parameters)  # in the order of registration
            node.meta[KEY] = dataclasses.replace(record, specs=specs)
            texts[node] = {before[name].text: spec.text for name, spec in after.items()}
            like_flats[node] = _numel(after)
        elif node.target in (UNSHARD, LOOK_UP, *GRADIENTS_OF_READS):
            node.update_arg(TEXT_POSITION[node.target], texts[node.args[0]][read_text(node)])
        if node.target in GRADIENTS_OF_READS or (node.target is aten.add.Tensor and set(node.args) <= set(like_flats)):
            like_flats[node] = like_flats[node.args[0]]
    for node, numel in like_flats.items():
        node.meta["val"] = node.meta["val"].new_empty(numel)
