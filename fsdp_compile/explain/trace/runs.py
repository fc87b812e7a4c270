"""Graphs of a region for other units than those that it was compiled for.

Blocks that are laid out alike share compiled code, where each is called from Python: one compile runs for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import fx

from fsdp_compile.capture.flat_inputs import flat_inputs
from fsdp_compile.ir.graph import KEY, Role, StepGraph, record_of, require, role_of

Claim = tuple[str, str]
"""Unit and name of a parameter."""


def claims_of_run(forward: fx.Graph, args: Sequence[object]) -> dict[Claim, Claim]:
    """For each parameter that a forward was compiled for, the one that it was called with."""
    given = flat_inputs(args)
    flats = enumerate(forward.find_nodes(op="placeholder"))
    return {
        compiled: called
        for position, node in flats
        if role_of(node) is Role.FLAT and position in given
        for compiled, called in zip(require(node).claims, given[position].claims, strict=True)
    }


def renamed(step: StepGraph, claims: Mapping[Claim, Claim]) -> StepGraph:
    """A copy of a graph for other parameters."""
    units = {compiled: called for (compiled, _), (called, _) in claims.items()}
    copied = step.copy()
    for node in copied.graph.nodes:
        record = record_of(node)
        if record is not None:
            called = [claims.get(claim, claim) for claim in record.claims]
            node.meta[KEY] = dataclasses.replace(
                record,
                unit=units.get(record.unit, record.unit),
                parameters=tuple(name for _, name in called),
                owners=tuple(unit for unit, _ in called) if record.owners else (),
            )
    return copied
