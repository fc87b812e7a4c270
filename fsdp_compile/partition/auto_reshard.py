"""Saves unsharded parameters from forward to backward where there is room, for `reshard_after_forward="auto"`.

    forward:   %w = fsdp_compile.unshard(%flat, spec) ... return (%y, %saved)   ->   return (%y, %w, %saved)
    backward:  %w = fsdp_compile.unshard(%flat, spec)                           ->   %w is an input

`planner/auto_reshard.py` chooses the flat parameters. The choice takes both graphs, so it is made after the partition.
It is made only where one graph is the whole model (several would each use the memory of all), and only for planned
schedules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import fx

from fsdp_compile._torch.dynamo import SavedForBackwardsAOTOutput, is_saved_for_backward
from fsdp_compile.cost.fusion import Fusion
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.ir.graph import KEY, Phase, Record, Role, StepGraph, require
from fsdp_compile.ir.queries import read_text, unsharded_value
from fsdp_compile.layout.spec import Reshard, parse
from fsdp_compile.ops.unshard import UNSHARD
from fsdp_compile.planner.auto_reshard import Halves, Pair, keep
from fsdp_compile.planner.from_graph import Outlined, accumulated_bytes, outline


def asks_for_choice(step: StepGraph) -> bool:
    """Whether a graph reads parameters that `Reshard.AUTO` leaves open."""
    return any(_is_open(node) for node in step.graph.find_nodes(op="call_function", target=UNSHARD))


def keep_unsharded(
    forward: StepGraph,
    backward: StepGraph,
    hardware: Hardware,
    fusion: Fusion,
    *,
    budget_bytes: int | None,
    margin: float,
) -> tuple[str, ...]:
    """Chooses what stays unsharded, and edits both graphs.

    Args:
        forward: The forward graph before the passes.
        backward: Its backward graph.
        hardware: What times are estimated for.
        fusion: How the graphs will be run.
        budget_bytes: For everything in either graph; `None` for what a plan without a budget may use.
        margin: How much slower than estimated the link may be.

    Returns:
        The units that stay unsharded.
    """
    if budget_bytes is not None:
        budget_bytes -= accumulated_bytes(forward)
    everything = budget_bytes is not None
    first, second = (outline(step, hardware, fusion, everything=everything) for step in (forward, backward))
    pairs = _pairs(forward, backward, first, second)
    halves = Halves(first.problem, second.problem)
    chosen = keep(halves, pairs, budget_bytes=budget_bytes, margin=margin)
    kept = [second.flats[pair.backward] for pair in chosen]
    for name in kept:
        _keep(forward, backward, name)
    for step in (forward, backward) if kept else ():
        step.graph.lint()
        step.gm.recompile()
    return tuple(require(_input(backward, name)).unit for name in kept)


def keep_all(forward: StepGraph, backward: StepGraph) -> None:
    """Saves from forward to backward every parameter that both read, as `Reshard.AFTER_BACKWARD` does; edits both."""
    names = [node.name for node in forward.nodes(Role.FLAT)]
    there = {node.name for node in backward.nodes(Role.FLAT)}
    for name in names:
        if name in there and _reads(backward, name) and _forward_reads_all(forward, backward, name):
            _keep(forward, backward, name)
    for step in (forward, backward):
        step.graph.lint()
        step.gm.recompile()


def _forward_reads_all(forward: StepGraph, backward: StepGraph, name: str) -> bool:
    return set(map(read_text, _reads(backward, name))) <= set(map(read_text, _reads(forward, name)))


def _is_open(read: fx.Node) -> bool:
    return unsharded_value(read) is None and parse(read_text(read)).reshard is Reshard.AUTO


def _pairs(forward: StepGraph, backward: StepGraph, first: Outlined, second: Outlined) -> tuple[Pair, ...]:
    """Flat parameters that both graphs gather, if the choice is open for all parameters that backward reads."""
    again = {name: number for number, name in enumerate(second.flats)}
    both = [(number, name) for number, name in enumerate(first.flats) if name in again]
    return tuple(
        Pair(number, again[name])
        for number, name in both
        if all(map(_is_open, _reads(backward, name))) and _forward_reads_all(forward, backward, name)
    )


def _input(step: StepGraph, name: str) -> fx.Node:
    return next(node for node in step.graph.find_nodes(op="placeholder") if node.name == name)


def _reads(step: StepGraph, flat: str) -> list[fx.Node]:
    """Reads of a flat parameter in graph order."""
    return [node for node in _input(step, flat).users if node.target is UNSHARD and unsharded_value(node) is None]


def _keep(forward: StepGraph, backward: StepGraph, flat: str) -> None:
    """Saves the parameters of one flat parameter that backward reads."""
    there = {read_text(read): read for read in reversed(_reads(forward, flat))}
    again: dict[str, list[fx.Node]] = {}
    for read in _reads(backward, flat):
        again.setdefault(read_text(read), []).append(read)
    for text, reads in again.items():
        _save(forward, there[text])
        record = require(_input(backward, flat)).of_one(parse(text), Role.SAVED_PARAM, Phase.BACKWARD)
        _take(backward, reads, there[text], record)


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


def _take(backward: StepGraph, reads: Iterable[fx.Node], value: fx.Node, record: Record) -> None:
    """Makes a value that forward saves first the first tensor among the inputs, instead of some reads."""
    first = next(n for n in backward.graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], torch.Tensor))
    with backward.graph.inserting_before(first):
        saved = backward.graph.placeholder(value.name)
    saved.meta.update({**value.meta, KEY: record})
    for read in reads:
        saved.meta.update({**read.meta, KEY: record})
        read.replace_all_uses_with(saved)
        backward.graph.erase_node(read)
