"""What a backward graph makes: whose gradients, how complete, and which of them pass autograd by."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx

from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.queries import beside
from fsdp_compile.ir.record import MADE, Role, require, role_of
from fsdp_compile.lower.runtime import Compiled, FlatKey, flat_key
from fsdp_compile.parameters.finder import Finder
from fsdp_compile.parameters.flat import FlatShard
from fsdp_compile.parameters.ops import accompany
from fsdp_compile.parameters.spec import Sync, Update
from fsdp_compile.parameters.together import Together, are_plain


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
        output: Position of the flat shard's gradient among the outputs, if it is complete: of all slots and all ranks,
            with nothing from an earlier backward in it.
    """

    flat: int
    offsets: tuple[int, ...]
    sync: Sync
    held: int | None
    partial: int | None
    update: Update = Update.AFTER_BACKWARD
    output: int | None = None


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
    complete = _outputs_of(step, Role.FLAT_GRADIENT)
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
            stands_alone = len(mine) == len(flat.specs) and held is None and partial is None
            output = complete.get(flat_key(flat)) if stands_alone and update is Update.AFTER_BACKWARD else None
            found.append(Arrival(index, offsets, mine[0].sync, held, partial, update, output))
    return found


def _outputs_of(step: StepGraph, role: Role) -> dict[FlatKey, int]:
    """Which output of a graph is what `role` says, by flat shard."""
    outputs = step.graph.output_node().args[0]
    assert isinstance(outputs, Sequence)
    nodes = [(index, node) for index, node in enumerate(outputs) if isinstance(node, fx.Node)]
    return {flat_key(require(node)): index for index, node in nodes if role_of(node) is role}


def _place_of(flat: fx.Node, role: Role, place: dict[fx.Node, int]) -> int | None:
    node = beside(flat, role)
    return None if node is None else place[node]


def note_arrivals(compiled: Compiled, noted: Sequence[Arrival]) -> Compiled:
    """Wraps a compiled backward so that parameters without a gradient keep `None`, and held ones count once.

    Small gradients that need not go through autograd one by one wait for the first of them (`parameters/together.py`).
    """
    places = [each.flat for each in noted]
    special = [
        (index, each)
        for index, each in enumerate(noted)
        if each.update is Update.IN_BACKWARD or each.held is not None or each.partial is not None
    ]
    finder = Finder()
    small = _Small(noted)

    def run(args: list[Any]) -> Any:
        flats = finder.find([args[place] for place in places])
        for index, each in special:
            _before(args, each, flats[index])
        made = list(compiled(args))
        for index in small.let_wait(made, flats, finder.changes):
            flat, each = flats[index], noted[index]
            if flat is not None and each.update is Update.AFTER_BACKWARD:  # else the graph says so itself
                flat.note_gradients(each.offsets, each.sync)
        return made

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Small:
    """Small gradients of one graph that may reach their parameters all at once.

    Args:
        noted: All gradients that the graph makes.
    """

    def __init__(self, noted: Sequence[Arrival]) -> None:
        self._noted = noted
        self._groups: list[_Group] = []
        self._others: list[int] = []
        self._changes = -1

    def let_wait(self, made: list[Any], flats: Sequence[FlatShard | None], changes: int) -> Sequence[int]:
        """Takes those out of what the graph has made that wait for another.

        Args:
            made: The graph's outputs.
            flats: The flat shards of this call.
            changes: Another number where they are others than in the last call.

        Returns:
            Positions in `flats` of those whose gradients autograd will see.
        """
        if changes != self._changes:
            self._sort(flats)
            self._changes = changes
        seen = self._others
        for group in self._groups:
            seen = seen + (group.positions[:1] if group.waits(made, flats) else group.positions)
        return seen

    def _sort(self, flats: Sequence[FlatShard | None]) -> None:
        kinds: dict[object, list[int]] = collections.defaultdict(list)
        for index, (each, flat) in enumerate(zip(self._noted, flats, strict=True)):
            is_small = each.output is not None and flat is not None and flat.small_kind is not None
            kinds[(flat.small_kind, flat.unit.outermost) if flat is not None and is_small else None].append(index)
        self._others = kinds.pop(None, [])
        self._groups = [_Group(kind, [self._output(at) for at in kind]) for kind in kinds.values()]

    def _output(self, index: int) -> int:
        output = self._noted[index].output
        assert output is not None  # small gradients are complete
        return output


@dataclasses.dataclass(frozen=True)
class _Group:
    """Small gradients of one model, dtype and device: where their flat shards are among those of a call."""

    positions: list[int]
    outputs: list[int]

    def waits(self, made: list[Any], flats: Sequence[FlatShard | None]) -> bool:
        """Takes all but the first out of what the graph has made, if these may wait for it."""
        mine = [flat for at in self.positions if (flat := flats[at]) is not None]
        gradients = [made[output] for output in self.outputs]
        together = Together.of(mine)
        if not are_plain(gradients) or not together.may_wait():
            return False
        together.wait(gradients[1:])
        for output in self.outputs[1:]:
            made[output] = None
        return True


def _before(args: list[Any], each: Arrival, flat: FlatShard | None) -> None:
    if flat is None and each.update is Update.IN_BACKWARD:
        raise _updates_a_copy()
    if each.held is not None or each.partial is not None:
        _take_along(args, each, flat)


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
