"""Parameters that a compiled forward leaves unsharded for the next microbatch, after `partition/auto_reshard.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx

from fsdp_compile._torch.dynamo import is_saved_for_backward
from fsdp_compile.ir.graph import Role, StepGraph, require, role_of
from fsdp_compile.layout.spec import Reshard
from fsdp_compile.lower.wrappers import Compiled
from fsdp_compile.planner.accumulated import accumulates
from fsdp_compile.runtime.units import FSDPParamGroup
from fsdp_compile.runtime.unshard import offer, version_of


@dataclasses.dataclass(frozen=True)
class Offered:
    """A flat parameter that stays unsharded.

    Attributes:
        flat: Its position among the inputs.
        values: Offset and position among the outputs of each parameter.
        formats: Offset of each parameter, and in which format it was gathered.
    """

    flat: int
    values: tuple[tuple[int, int], ...]
    formats: tuple[tuple[int, str], ...]


def offered_params(step: StepGraph) -> tuple[Offered, ...]:
    """The flat parameters of a transformed forward all of whose parameters are saved for more than its backward."""
    if not accumulates(step):
        return ()
    saved = {require(node).claims[0]: (place, require(node).specs[0].gather_format) for place, node in _saved(step)}
    found = []
    for index, node in enumerate(step.graph.find_nodes(op="placeholder")):
        if role_of(node) is Role.FLAT:
            flat = require(node)
            pairs = zip(flat.claims, flat.specs, strict=True)
            kept = [(spec.offset, *saved[claim]) for claim, spec in pairs if claim in saved]
            if len(kept) == len(flat.specs):
                values = tuple((offset, place) for offset, place, _ in kept)
                found.append(Offered(index, values, tuple((offset, wire) for offset, _, wire in kept)))
    return tuple(found)


def _saved(step: StepGraph) -> list[tuple[int, fx.Node]]:
    """Position and node of each full parameter that stays because there is room."""
    output = step.output
    (returned,) = output.args
    assert isinstance(returned, tuple | list)
    outputs = enumerate(zip(returned, output.meta["desc"], strict=True))
    saved = [(place, node) for place, (node, note) in outputs if is_saved_for_backward(note)]
    full = [(place, node) for place, node in saved if isinstance(node, fx.Node) and role_of(node) is Role.FULL]
    return [(place, node) for place, node in full if require(node).specs[0].reshard is Reshard.AUTO]


def offer_params(compiled: Compiled, offered: Sequence[Offered]) -> Compiled:
    """Wraps a compiled forward so that what it saves is taken by the forwards after its backward."""

    def run(args: list[Any]) -> Any:
        flats = [FSDPParamGroup.of(args[each.flat]) for each in offered]
        versions = [() if flat is None else version_of(flat) for flat in flats]
        result = compiled(args)
        for each, flat, version in zip(offered, flats, versions, strict=True):
            if flat is not None:
                offer(flat, {offset: result[place] for offset, place in each.values}, dict(each.formats), version)
        return result

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
