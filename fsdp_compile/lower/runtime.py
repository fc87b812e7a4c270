"""What runs around a compiled graph at every step: two look-ups per flat shard, and little else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.queries import beside
from fsdp_compile.ir.record import Role, require, role_of
from fsdp_compile.parameters import keeping
from fsdp_compile.parameters.flat import FlatShard
from fsdp_compile.parameters.forward_depth import in_forward
from fsdp_compile.parameters.integrity import check_inside_graph
from fsdp_compile.parameters.ops import accompany
from fsdp_compile.parameters.spec import Sync

Compiled = Callable[[list[Any]], Any]


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Which gradients of one flat shard a backward graph makes.

    Attributes:
        flat: Position of the flat shard among the inputs.
        offsets: Slots that get gradients.
        sync: How far they are summed.
        held: Position of the held gradients that are added to them, if there are any.
        partial: Position of the reduced ones that are added before the sum over replicas, if there are any.
    """

    flat: int
    offsets: tuple[int, ...]
    sync: Sync
    held: int | None
    partial: int | None


@dataclasses.dataclass(frozen=True)
class FlatInput:
    """A flat shard among the inputs of a forward graph.

    Attributes:
        position: Its place.
        kept: Offset and place of each of its full parameters that stayed gathered.
    """

    position: int
    kept: tuple[tuple[int, int], ...]


def flat_inputs(step: StepGraph) -> list[FlatInput]:
    """The flat shards among a graph's inputs."""
    placeholders = step.graph.find_nodes(op="placeholder")
    kept = [(i, require(node)) for i, node in enumerate(placeholders) if role_of(node) is Role.KEPT]
    found = []
    for index, node in enumerate(placeholders):
        if role_of(node) is Role.FLAT:
            owner = require(node)
            mine = [(i, r) for i, r in kept if r.unit == owner.unit and r.parameters[0] in owner.parameters]
            found.append(FlatInput(index, tuple((record.specs[0].offset, i) for i, record in mine)))
    return found


def arrivals(step: StepGraph) -> list[Arrival]:
    """Which slots a backward graph makes gradients for."""
    placeholders = step.graph.find_nodes(op="placeholder")
    place = {node: index for index, node in enumerate(placeholders)}
    made = {
        claim: spec
        for record in map(require, step.nodes(Role.GRADIENT))
        for claim, spec in zip(record.claims, record.specs, strict=True)
    }
    found = []
    for node, index in place.items():
        if role_of(node) is not Role.FLAT:
            continue
        flat = require(node)
        mine = [made[flat.unit, name] for name in flat.parameters if (flat.unit, name) in made]
        if mine:
            offsets = tuple(sorted(spec.offset for spec in mine))
            held, partial = (_place_of(node, role, place) for role in (Role.HELD, Role.PARTIAL))
            found.append(Arrival(index, offsets, mine[0].sync, held, partial))
    return found


def _place_of(flat: fx.Node, role: Role, place: dict[fx.Node, int]) -> int | None:
    node = beside(flat, role)
    return None if node is None else place[node]


def check_inputs(compiled: Compiled, inputs: Sequence[FlatInput]) -> Compiled:
    """Wraps a compiled forward that may be entered without the model's own `__call__`: from a compiled function."""

    def run(args: list[Any]) -> Any:
        if not in_forward():
            for each in inputs:
                flat = FlatShard.of(args[each.position])
                if flat is not None:
                    check_inside_graph(flat)
                    _replace_stale(args, flat, each)
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _replace_stale(args: list[Any], flat: FlatShard, at: FlatInput) -> None:
    if at.kept and keeping.is_stale(flat):
        keeping.refresh(flat)
        assert flat.kept is not None
        for offset, position in at.kept:
            args[position] = flat.kept.values[offset]


def note_arrivals(compiled: Compiled, noted: Sequence[Arrival]) -> Compiled:
    """Wraps a compiled backward so that parameters without a gradient keep `None`, and held ones count once."""

    def run(args: list[Any]) -> Any:
        for each in noted:
            flat = FlatShard.of(args[each.flat])
            if flat is not None:
                flat.note_gradients(each.offsets, each.sync)
            if each.held is not None or each.partial is not None:
                _take_along(args, each, flat)
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _take_along(args: list[Any], each: Arrival, flat: FlatShard | None) -> None:
    """Leaves among the inputs only those gradients of earlier backward passes that nobody has taken."""
    held, partial = (None if at is None else args[at] for at in (each.held, each.partial))
    if flat is not None:
        held, partial = accompany(flat, each.offsets, held, partial)
    else:  # saved-tensor hooks gave a copy, whose owner is unknown: what it holds is reduced at the end
        held, partial = (None if value is None else value.new_zeros(value.shape) for value in (held, partial))
    for at, value in ((each.held, held), (each.partial, partial)):
        if at is not None:
            args[at] = value


def host_copies_from(step: StepGraph) -> str:
    """Type of the device from which a graph copies gradients to the host; empty if it copies none."""
    return next((require(node).specs[0].compute for node in step.nodes(Role.OFFLOAD_OUT)), "")


def wait_for_host_copies(compiled: Compiled, device_type: str) -> Compiled:
    """Wraps a compiled backward that copies gradients to the host: the host waits once, when all copies are queued."""

    def run(args: list[Any]) -> Any:
        result = compiled(args)
        if device_type != "cpu":
            torch.get_device_module(device_type).current_stream().synchronize()  # it waits for each copy
        return result

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
