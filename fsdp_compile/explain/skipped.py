"""What is not done, and why: parameters that are not sharded, gathered or reduced, memory that is not freed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from fsdp_compile.cost.communicate import Kind
from fsdp_compile.explain.report import GraphPlan, Skipped
from fsdp_compile.explain.units import UnitData
from fsdp_compile.fsdp2.unit import Unit
from fsdp_compile.ir.graph import Phase
from fsdp_compile.layout.spec import Reshard
from fsdp_compile.sharding.arguments import is_whole

_NAMED = 3
_MUCH_PADDING = 0.1
_LARGE_SHARE = 1000
"""Parameters below a thousandth of their unit are not worth a line."""


def skipped(model: nn.Module, units: Sequence[UnitData], graphs: Sequence[GraphPlan]) -> Iterator[Skipped]:
    """Compares the parameters of a model with what its graphs do."""
    yield from _graph_breaks(graphs)
    sharded = {param.name for unit in units for param in unit.params}
    left = {name: p for name, p in model.named_parameters() if name not in sharded}
    yield from _some([n for n, p in left.items() if not is_whole(p)], "not sharded", "listed in ignored_params")
    yield from _some([n for n, p in left.items() if is_whole(p)], "not sharded", "it cannot be split")
    if units and all(slot.spec.size * slot.spec.replicas == 1 for unit in units for slot in unit.params):
        yield Skipped("all collectives", "there is one rank")
        return
    yield from _uneven(units)
    yield from _never_gathered(units, graphs)
    yield from _never_reduced(units, graphs)
    yield from _kept_unsharded(units, graphs)


def not_in_graphs(units: Sequence[Unit]) -> Iterator[Skipped]:
    """Units of a model that has run for which nothing was compiled, so that its graphs do not count them."""
    why = "nothing was compiled for it: it has not run, or it runs the code of a unit that is laid out alike"
    yield from _some(not_compiled(units), "not in the numbers", why)


def not_compiled(units: Sequence[Unit]) -> list[str]:
    """Units with parameters for which nothing was compiled."""
    compiled = {unit for unit in units if any(region.steps for region in unit.compiled_regions.values())}
    return [unit.title for unit in units if unit.groups and unit not in compiled]


def _graph_breaks(graphs: Sequence[GraphPlan]) -> Iterator[Skipped]:
    regions = len({graph.region for graph in graphs})
    if regions > 1:
        yield Skipped(
            "overlap across compiled regions",
            f"the model is in {regions}: block by block (explain() plans it with regions='blocks'), or by graph breaks "
            "(TORCH_LOGS=graph_breaks says where)",
        )


def _uneven(units: Sequence[UnitData]) -> Iterator[Skipped]:
    """Parameters whose padding is a considerable part of their memory and messages."""
    found: dict[str, list[str]] = {}
    for unit in units:
        for slot in unit.params:
            spec = slot.spec
            padding = spec.shard_numel * spec.size / max(spec.numel, 1) - 1
            large = spec.numel * _LARGE_SHARE >= sum(s.spec.numel for s in unit.params)
            if spec.dim is not None and padding > _MUCH_PADDING and large:
                why = f"its {spec.shape[spec.dim]} rows over {spec.size} ranks are padded by {100 * padding:.0f} %"
                found.setdefault(why, []).append(slot.name)
    for why, names in found.items():
        yield from _some(names, "even split", why)


Served = set[tuple[str, str]]
"""Unit and name of parameters."""


def _served(graphs: Sequence[GraphPlan], *kinds: Kind) -> Served:
    """The parameters that collectives of some kinds are for."""
    sent = [c for graph in graphs for c in graph.collectives if c.kind in kinds]
    return {(unit, name) for c in sent for unit in c.units for name in c.parameters}


def _never_gathered(units: Sequence[UnitData], graphs: Sequence[GraphPlan]) -> Iterator[Skipped]:
    for phase in dict.fromkeys(graph.phase for graph in graphs):
        read = _served([graph for graph in graphs if graph.phase is phase], Kind.GATHER, Kind.EXCHANGE)
        unread = [
            slot.name
            for unit in units
            for slot in unit.params
            if slot.spec.size > 1 and (phase is Phase.FORWARD or slot.spec.reshard is not Reshard.AFTER_BACKWARD)
            if (unit.title, slot.name) not in read
        ]
        why = "the graph does not read it" if phase is Phase.FORWARD else "no gradient needs its value"
        yield from _some(unread, f"not gathered in {phase.value}", why)


def _never_reduced(units: Sequence[UnitData], graphs: Sequence[GraphPlan]) -> Iterator[Skipped]:
    if not any(graph.phase is Phase.BACKWARD for graph in graphs):
        yield Skipped("backward", "gradients are off, or nothing that the model returns needs them")
        return
    reduced = _served(graphs, Kind.REDUCE, Kind.REPLICATE, Kind.EXCHANGE)
    missing = [slot for unit in units for slot in unit.params if (unit.title, slot.name) not in reduced]
    yield from _some([slot.name for slot in missing if not slot.trained], "not reduced", "frozen")
    yield from _some([slot.name for slot in missing if slot.trained], "not reduced", "no output depends on it")


_WHY_KEPT = {
    Reshard.AFTER_BACKWARD: "reshard_after_forward=False",
    Reshard.AUTO: 'reshard_after_forward="auto", and there is room',
    Reshard.AFTER_FORWARD: "its memory leaves the graph",
}


def _kept_unsharded(units: Sequence[UnitData], graphs: Sequence[GraphPlan]) -> Iterator[Skipped]:
    asked = {unit.title: slot.spec.reshard for unit in units for slot in unit.params}
    for graph in graphs:
        kept = [u for c in graph.collectives if c.kind is Kind.GATHER and c.reshard is None for u in c.units]
        what = f"not resharded after {graph.phase.value}"
        for reshard, why in _WHY_KEPT.items():
            yield from _some([unit for unit in kept if asked[unit] is reshard], what, why)


def _some(names: Sequence[str], what: str, why: str) -> Iterator[Skipped]:
    """One line for all names that share a reason."""
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield Skipped(f"{', '.join(names[:_NAMED])}{more}: {what}", why)
