"""Saves unsharded parameters from forward to backward where there is room, for `reshard_after_forward="auto"`.

    forward:   %w = fsdp_compile.unshard(%flat, spec) ... return (%y, %saved)   ->   return (%y, %w, %saved)
    backward:  %w = fsdp_compile.unshard(%flat, spec)                           ->   %w is an input

The choice takes both graphs, so it is made after the partition. It is made only where one graph is the whole model
(several would each use the memory of all), and only for planned schedules.

Each saved byte spares the link as much as any other, so the bucket that is unused for the shortest time comes first:
the one that forward uses last and backward needs first. Of the numbers of buckets that fit, the smallest is taken that
brings the step as near to its least estimated time as any, on a link as estimated and on one that is `margin` times
slower.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from fsdp_compile._torch.dynamo import SavedForBackwardsAOTOutput, is_saved_for_backward
from fsdp_compile.cost.fusion import Fusion
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.ir.graph import KEY, Phase, Record, Role, StepGraph, require
from fsdp_compile.ir.queries import read_text, unsharded_value
from fsdp_compile.layout.spec import Reshard, parse
from fsdp_compile.ops.post_forward import SHARD_POST_FORWARD, UNSHARD_POST_FORWARD
from fsdp_compile.ops.unshard import UNSHARD
from fsdp_compile.partition.partition import shard_post_forward
from fsdp_compile.planner.from_graph import accumulated_bytes, outline
from fsdp_compile.planner.list_schedule import place, replay
from fsdp_compile.planner.problem import Problem, Saved

NEAR = 1.002
"""Times that differ by less than this count as the same: estimates are no better than that."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A bucket that both graphs gather, by its number among the gathers of each."""

    forward: int
    backward: int


@dataclasses.dataclass(frozen=True)
class Halves:
    """The problems of forward and backward."""

    forward: Problem
    backward: Problem

    def keeping(self, pairs: Sequence[Pair]) -> Halves:
        """The same step, if these buckets stay unsharded: backward finds them in memory, and does not gather them."""
        first, second = {pair.forward for pair in pairs}, {pair.backward for pair in pairs}
        forward, backward, end = self.forward, self.backward, len(self.forward.steps_us)
        gathers = tuple(dataclasses.replace(g, kept=True) if i in first else g for i, g in enumerate(forward.gathers))
        least = _with(forward, [(g.free, end, g.size_bytes) for i, g in enumerate(gathers) if i in first])
        found = [backward.gathers[pair.backward] for pair in pairs]
        return Halves(
            dataclasses.replace(forward, gathers=gathers, least_bytes=least),
            dataclasses.replace(
                backward,
                gathers=tuple(gather for i, gather in enumerate(backward.gathers) if i not in second),
                saved=tuple(Saved(need=g.need, free=g.free, size_bytes=g.size_bytes) for g in found),
                least_bytes=_with(backward, [(0, g.need, g.size_bytes) for g in found]),
            ),
        )


def _with(problem: Problem, held: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    """What a problem holds at least, if it holds more; empty where not everything is counted."""
    return tuple(map(operator.add, problem.least_bytes, problem.sums(held)))


def choose(step: Halves, pairs: Sequence[Pair], *, budget_bytes: int | None, margin: float) -> tuple[Pair, ...]:
    """The buckets that stay unsharded from forward to backward.

    Args:
        step: Both graphs, if all buckets are resharded.
        pairs: Buckets that may stay.
        budget_bytes: Most bytes of everything that may be live in either graph; `least_bytes` of both are known then.
            `None` for what a schedule without a budget may use.
        margin: How much slower than estimated the link may be.
    """
    forward, backward = step.forward, step.backward

    def held_us(pair: Pair) -> float:
        """How long a bucket would be in memory without being used."""
        after_us = forward.compute_us - forward.reached_us[forward.gathers[pair.forward].free]
        return after_us + backward.reached_us[backward.gathers[pair.backward].need]

    first = sorted(pairs, key=held_us)
    found: dict[int, tuple[float, ...]] = {}
    for count in _counts(len(first)):
        kept = step.keeping(first[:count])
        if count and not _fits(step, kept, budget_bytes):
            break
        found[count] = _times_us(kept, budget_bytes, margin)
    least_us = [min(column) for column in zip(*found.values(), strict=True)]

    def lost(count: int) -> float:
        return max(us / least if least else 1.0 for us, least in zip(found[count], least_us, strict=True))

    best = min(found, key=lambda count: (max(NEAR, lost(count)), count))
    return tuple(first[:best])


def _counts(most: int) -> Iterator[int]:
    """Numbers of buckets to try: every small one, then in steps of about a fifth, since each one costs a plan."""
    count = 0
    while count < most:
        yield count
        count += 1 + count // 5
    yield most


def _fits(step: Halves, kept: Halves, budget_bytes: int | None) -> bool:
    """Whether both graphs stay within their budgets."""
    for before, after in ((step.forward, kept.forward), (step.backward, kept.backward)):
        # Under a budget for everything, a schedule still needs room to prefetch one bucket and to reduce another.
        room = before.promised_bytes - max(before.in_use_bytes(), default=0)
        most = before.promised_bytes if budget_bytes is None else budget_bytes - room
        if max(after.least_live_bytes(), default=0) > most:
            return False
    return True


def _times_us(step: Halves, budget_bytes: int | None, margin: float) -> tuple[float, ...]:
    """Estimated time of both graphs, on the link as estimated and on a slower one."""
    plans = []
    for half in (step.forward, step.backward):
        # At least what the problem needs: the pass that plans the graph reports a budget that is too small.
        most = half.promised_bytes if budget_bytes is None else budget_bytes
        most = max(most, max(half.least_live_bytes(), default=0))
        plans.append((half, place(half, budget_bytes=most, margin=margin)))
    return tuple(
        sum(replay(half.slower(times), plan.issued, plan.waits) for half, plan in plans) for times in (1.0, margin)
    )


def keep_unsharded(
    forward: StepGraph,
    backward: StepGraph,
    hardware: Hardware,
    fusion: Fusion,
    *,
    budget_bytes: int | None,
    margin: float,
) -> tuple[str, ...]:
    """Chooses what stays unsharded of that which `Reshard.AUTO` leaves open; edits both graphs, before the passes.

    The budget is for everything in either graph; `None` for what a plan without a budget may use. The link may be
    slower than estimated by `margin`.
    """
    if not any(map(_is_open, backward.graph.find_nodes(op="call_function", target=UNSHARD))):
        return ()
    if budget_bytes is not None:
        budget_bytes -= accumulated_bytes(forward)
    everything = budget_bytes is not None
    first, second = (outline(step, hardware, fusion, everything=everything) for step in (forward, backward))
    again = {gather.unit: number for number, gather in enumerate(second.gathers)}
    pairs = [
        Pair(number, again[name])
        for number, name in enumerate(gather.unit for gather in first.gathers)
        # The choice has to be open for all parameters that backward reads.
        if name in again and all(map(_is_open, _reads(backward, name))) and _forward_reads_all(forward, backward, name)
    ]
    chosen = choose(Halves(first, second), pairs, budget_bytes=budget_bytes, margin=margin)
    kept = [second.gathers[pair.backward].unit for pair in chosen]
    for name in kept:
        _keep(forward, backward, name)
    if kept:
        _finish(forward, backward)
    return tuple(require(_input(backward, name)).unit for name in kept)


def keep_all(forward: StepGraph, backward: StepGraph) -> None:
    """Saves from forward to backward every parameter that both read, as `Reshard.AFTER_BACKWARD` does; edits both."""
    for name in [node.name for node in forward.nodes(Role.FLAT)]:
        if _reads(backward, name) and _forward_reads_all(forward, backward, name):
            _keep(forward, backward, name)
    _finish(forward, backward)


def keep_parts(forward: StepGraph, backward: StepGraph) -> None:
    """Saves each rank's part of every parameter that both read, as `shard_post_forward` leaves it; edits both.

    Backward: %w = fsdp_compile.unshard(%flat, spec)   ->   %w = fsdp_compile.unshard_post_forward(%part, spec)
    """
    shard_post_forward(forward.graph)
    for part in forward.graph.find_nodes(op="call_function", target=SHARD_POST_FORWARD):
        flat, text = part.args[0].args[0].name, read_text(part)
        reads = [read for read in _reads(backward, flat) if read_text(read) == text]
        if reads:
            _save(forward, part)
            saved = _input_for(backward, part, require(part))
            with backward.graph.inserting_before(reads[0]):
                again = backward.graph.call_function(UNSHARD_POST_FORWARD, (saved, text))
            again.meta.update(reads[0].meta)
            for read in reads:
                read.replace_all_uses_with(again)
                backward.graph.erase_node(read)
    _finish(forward, backward)


def _finish(*steps: StepGraph) -> None:
    for step in steps:
        step.graph.lint()
        step.gm.recompile()


def _forward_reads_all(forward: StepGraph, backward: StepGraph, name: str) -> bool:
    return set(map(read_text, _reads(backward, name))) <= set(map(read_text, _reads(forward, name)))


def _is_open(read: fx.Node) -> bool:
    return unsharded_value(read) is None and parse(read_text(read)).reshard is Reshard.AUTO


def _input(step: StepGraph, name: str) -> fx.Node:
    return next(node for node in step.graph.find_nodes(op="placeholder") if node.name == name)


def _reads(step: StepGraph, flat: str) -> list[fx.Node]:
    """Reads of a flat parameter in graph order; none where the graph does not take it."""
    found = [user for node in step.nodes(Role.FLAT) if node.name == flat for user in node.users]
    return [node for node in found if node.target is UNSHARD and unsharded_value(node) is None]


def _keep(forward: StepGraph, backward: StepGraph, flat: str) -> None:
    """Saves the parameters of one flat parameter that backward reads."""
    there = {read_text(read): read for read in reversed(_reads(forward, flat))}
    again: dict[str, list[fx.Node]] = {}
    for read in _reads(backward, flat):
        again.setdefault(read_text(read), []).append(read)
    for text, reads in again.items():
        _save(forward, there[text])
        record = require(_input(backward, flat)).of_one(parse(text), Role.SAVED_PARAM, Phase.BACKWARD)
        saved = _input_for(backward, there[text], record)
        for read in reads:
            saved.meta.update({**read.meta, KEY: record})
            read.replace_all_uses_with(saved)
            backward.graph.erase_node(read)


def _save(forward: StepGraph, value: fx.Node) -> None:
    """Returns a value as the first of those that are saved for backward."""
    output = forward.output
    (returned,) = output.args
    assert isinstance(returned, tuple | list)
    notes = output.meta["desc"]
    # AOTAutograd expects outputs in this order: the user's, saved tensors, saved sizes.
    place = next((i for i, note in enumerate(notes) if is_saved_for_backward(note)), len(notes))
    output.args = (type(returned)([*returned[:place], value, *returned[place:]]),)
    saved = [SavedForBackwardsAOTOutput(0), *notes[place:]]
    numbered = [dataclasses.replace(note, idx=number) for number, note in enumerate(saved)]
    output.meta["desc"] = [*notes[:place], *numbered]


def _input_for(backward: StepGraph, value: fx.Node, record: Record) -> fx.Node:
    """The first tensor among the inputs: a value that forward saves first."""
    first = next(n for n in backward.graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], torch.Tensor))
    with backward.graph.inserting_before(first):
        saved = backward.graph.placeholder(value.name)
    saved.meta.update({**value.meta, KEY: record})
    return saved
