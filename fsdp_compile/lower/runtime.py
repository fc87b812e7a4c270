"""What runs around a compiled graph at every step: two look-ups per flat shard, and little else."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fsdp_compile._torch import backward_in_progress, below_autograd
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.queries import beside
from fsdp_compile.ir.record import MADE, Phase, Record, Role, require, role_of
from fsdp_compile.parameters import keeping, updating
from fsdp_compile.parameters.finder import Finder
from fsdp_compile.parameters.flat import FlatShard
from fsdp_compile.parameters.forward_depth import in_forward
from fsdp_compile.parameters.integrity import check_inside_graph
from fsdp_compile.parameters.ops import accompany
from fsdp_compile.parameters.spec import Sync, Update
from fsdp_compile.parameters.together import Together

Compiled = Callable[[list[Any]], Any]
FlatKey = tuple[str, tuple[str, ...]]
"""Unit and parameters: which flat shard of a region a node stands for, in either graph."""


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Which gradients of one flat shard a backward graph makes.

    Attributes:
        flat: Position of the flat shard among the inputs.
        offsets: Slots that get gradients.
        sync: How far they are summed.
        held: Position of the held gradients that are added to them, if there are any.
        partial: Position of the reduced ones that are added before the sum over replicas, if there are any.
        update: Where the gradients go: out of the graph, or into an update inside of it.
    """

    flat: int
    offsets: tuple[int, ...]
    sync: Sync
    held: int | None
    partial: int | None
    update: Update = Update.AFTER_BACKWARD


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
        for record in map(require, step.nodes(*MADE))
        for claim, spec in zip(record.claims, record.specs, strict=True)
    }
    updated = {place[node.all_input_nodes[0]] for node in step.nodes(Role.UPDATE)}
    found = []
    for node, index in place.items():
        if role_of(node) is not Role.FLAT:
            continue
        flat = require(node)
        mine = [made[flat.unit, name] for name in flat.parameters if (flat.unit, name) in made]
        if mine:
            offsets = tuple(sorted(spec.offset for spec in mine))
            held, partial = (_place_of(node, role, place) for role in (Role.HELD, Role.PARTIAL))
            update = Update.IN_BACKWARD if index in updated else Update.AFTER_BACKWARD
            found.append(Arrival(index, offsets, mine[0].sync, held, partial, update))
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
                    if backward_in_progress() == -1:
                        updating.begin(flat)
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
    places = [each.flat for each in noted]
    finder = Finder()

    def run(args: list[Any]) -> Any:
        together: dict[object, Together] = collections.defaultdict(Together)
        for each, flat in zip(noted, finder.find([args[place] for place in places]), strict=True):
            if flat is not None:
                if each.update is Update.AFTER_BACKWARD:  # else the graph says so itself
                    flat.note_gradients(each.offsets, each.sync)
                    if each.sync is Sync.ALL and flat.small_kind is not None:
                        together[flat.small_kind].expect(flat)
            elif each.update is Update.IN_BACKWARD:
                raise _updates_a_copy()
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


def _updates_a_copy() -> UnsupportedModelError:
    return UnsupportedModelError(
        "backward was given a copy of the parameters that it is to update: hooks on saved tensors replaced them",
        where="step_in_backward() under torch.autograd.graph.saved_tensors_hooks() or save_on_cpu()",
        instead="hooks that return the very tensors that do not require grad or are leaves, or optimizer.step() "
        "without step_in_backward()",
    )


def read_again(forward: StepGraph, backward: StepGraph) -> frozenset[FlatKey]:
    """Flat shards that both graphs of a region read, and that are updated in backward."""
    return _updated(forward) & _updated(backward)


def _updated(step: StepGraph) -> frozenset[FlatKey]:
    records = map(require, step.nodes(Role.FLAT))
    return frozenset(_key(record) for record in records if record.specs[0].update is Update.IN_BACKWARD)


def count_reads(compiled: Compiled, step: StepGraph, flats: frozenset[FlatKey]) -> Compiled:
    """Wraps a compiled graph so that forwards whose backward has not run are known to updates in backward.

    Args:
        compiled: Runs the graph.
        step: The graph.
        flats: What `read_again` found.
    """
    placeholders = enumerate(step.graph.find_nodes(op="placeholder"))
    positions = [i for i, node in placeholders if role_of(node) is Role.FLAT and _key(require(node)) in flats]
    note = updating.note_read if step.phase is Phase.FORWARD else updating.note_backward

    def run(args: list[Any]) -> Any:
        for position in positions:
            flat = FlatShard.of(args[position])
            if flat is not None:
                note(flat)
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run if positions else compiled


def _key(record: Record) -> FlatKey:
    return record.unit, record.parameters


def runs_optimizers(step: StepGraph) -> bool:
    """Whether a graph updates parameters: optimizers are users' code, which may want autograd."""
    return any(True for _ in step.nodes(Role.UPDATE))


def without_autograd(compiled: Compiled) -> Compiled:
    """Wraps a compiled graph so that none of its operators looks for autograd, which no graph has a use for.

    Collectives have their derivatives in Python, which would run at each call only to find that nobody wants them.
    """

    def run(args: list[Any]) -> Any:
        with below_autograd():
            return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


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
