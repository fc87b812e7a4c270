"""nothing-unsharded-saved: backward gathers again what it needs, instead of having it saved."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from fsdp_compile.ir.graph import Phase, Role, record_of, require, role_of
from fsdp_compile.layout.spec import Reshard, UnshardSpec, Update
from fsdp_compile.verify.facts import Facts, dtype_of, shape_of, size_bytes
from fsdp_compile.verify.report import Complaint
from fsdp_compile.verify.trace_elements import WIRES, origin

RULE = "nothing-unsharded-saved"
_TOLD = ("aten", "prims", "_c10d_functional", "_dtensor", "fsdp_compile")
"""Namespaces whose random operators have torch's tag: torch's and this package's."""


def nothing_unsharded_saved(facts: Facts) -> list[Complaint]:
    """Finds saved values that backward could gather again, and backward results that keep gathered memory."""
    if facts.step.phase is Phase.BACKWARD:
        return [*_returned_by_backward(facts), *_wrongly_taken(facts)]
    derived = _derived(facts)
    return [*_wrong_parts(facts), *_saved_whole(facts, derived)]


def _saved_whole(facts: Facts, derived: dict[fx.Node, str]) -> list[Complaint]:
    return [
        Complaint(
            RULE,
            node,
            f"saves {size_bytes(node):,} bytes for backward that come from {derived[node]} alone",
            "backward gathers again; to keep gathered parameters, set reshard_after_forward=False",
        )
        for node in dict.fromkeys(facts.saved)
        if node in derived and not _may_stay(node)
    ]


def _may_stay(node: fx.Node) -> bool:
    """Whether a node is a full parameter that `Reshard.AUTO` may leave unsharded, or what a collective has brought.

    Collectives of the program's own are not run again for backward.
    """
    if record_of(node) is None and getattr(node.target, "namespace", "") == "_c10d_functional":
        return True
    return role_of(node) is Role.FULL and all(spec.reshard is Reshard.AUTO for spec in require(node).specs)


def _wrongly_taken(facts: Facts) -> list[Complaint]:
    """Inputs of backward that are recorded as full parameters saved by forward, and cannot be."""
    return [
        Complaint(
            RULE,
            node,
            f"is taken for {', '.join(require(node).parameters)}, which forward kept",
            'the whole parameter, as it is read, with reshard_after_forward="auto"',
        )
        for node in facts.of_role(Role.SAVED_PARAM)
        if [(spec.reshard, spec.shape, spec.param_dtype) for spec in require(node).specs]
        != [(Reshard.AUTO, shape_of(node), dtype_of(node))]
    ]


def _wrong_parts(facts: Facts) -> list[Complaint]:
    """Post-forward shards that are not 1/k of the one parameter that asks for it, or not this rank's."""
    return [
        Complaint(
            RULE,
            node,
            f"keeps {size_bytes(node):,} bytes of {', '.join(require(node).parameters)}",
            "a rank keeps its own 1/k of a parameter with reshard_after_forward=k, padding included",
        )
        for node in dict.fromkeys(facts.saved)
        if role_of(node) is Role.POST_FORWARD_SHARD and not _is_part(node)
    ]


def _is_part(node: fx.Node) -> bool:
    """Whether the ends of a post-forward shard come from the ends of its place in the gathered message, on any rank."""
    (spec,) = require(node).specs
    if spec.post_forward_size == 1 or shape_of(node) != (spec.post_forward_numel,):
        return False
    per_byte = WIRES[spec.gather_format].per_byte if spec.gather_format in WIRES else 1
    for own in range(spec.post_forward_size):
        for index in (0, spec.post_forward_numel - 1):
            sender, place = divmod(own * spec.post_forward_numel + index, spec.extent)
            place -= place % per_byte  # elements that share a byte are traced to the first of them
            found = origin(node, index, own)
            if found.node is None or role_of(found.node) is not Role.FLAT:
                return False
            if ([hop.rank for hop in found.hops], found.index) != ([sender], spec.offset + place):
                return False
    return True


def _returned_by_backward(facts: Facts) -> list[Complaint]:
    return [
        Complaint(
            RULE,
            node,
            "leaves the backward graph, though its memory is gathered",
            "backward returns gradients, in memory of their own",
        )
        for node in dict.fromkeys(facts.step.output.all_input_nodes)
        if node in facts.memory
    ]


def _derived(facts: Facts) -> dict[fx.Node, str]:
    """Values that are, share memory with, or follow from full parameters alone, and the first such parameter."""
    derived: dict[fx.Node, str] = {}
    for node in facts.nodes:
        record = record_of(node)
        if record is not None and record.role in (Role.GATHER_WAIT, Role.FULL, Role.COPY_OUT):
            dropped = [name for name, spec in zip(record.parameters, record.specs, strict=True) if _is_dropped(spec)]
            if dropped:
                derived[node] = dropped[0]
        # Saving a post-forward shard is what `reshard_after_forward=k` asks for.
        elif role_of(node) is not Role.POST_FORWARD_SHARD and _follows(node, derived):
            derived[node] = derived[node.all_input_nodes[0]]
    return derived


def _is_dropped(spec: UnshardSpec) -> bool:
    # On a single rank a saved read is the flat parameter's own memory, which an update in backward would change.
    may_go = spec.size > 1 or spec.update is Update.IN_BACKWARD
    return may_go and spec.reshard is not Reshard.AFTER_BACKWARD


def _follows(node: fx.Node, derived: dict[fx.Node, str]) -> bool:
    """Whether a node depends on nothing but derived values; random results depend on a state, too."""
    if node.op != "call_function" or _may_be_random(node.target):
        return False
    inputs = node.all_input_nodes
    return bool(inputs) and all(source in derived for source in inputs)


def _may_be_random(target: Any) -> bool:
    """Whether an operator draws random numbers, or is a user's, which may do so and not say it."""
    if target is getitem:
        return False
    is_tagged = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return is_tagged or getattr(target, "namespace", "") not in _TOLD
