"""nothing-unsharded-saved: backward gathers again what it needs, and never finds it saved."""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compile.ir.record import Phase, Role, record_of
from fsdp_compile.parameters.spec import ReadSpec, Reshard
from fsdp_compile.verify.complaint import Complaint
from fsdp_compile.verify.facts import Facts, size_bytes

RULE = "nothing-unsharded-saved"


def nothing_unsharded_saved(facts: Facts) -> list[Complaint]:
    """Finds saved values that backward could gather again, and backward results that keep gathered memory."""
    if facts.step.phase is Phase.BACKWARD:
        return _returned_by_backward(facts)
    derived = _derived(facts)
    return [
        Complaint(
            RULE,
            node,
            f"saves {size_bytes(node):,} bytes for backward that come from {derived[node]} alone",
            "backward gathers again; to keep gathered parameters, set reshard_after_forward=False",
        )
        for node in dict.fromkeys(facts.saved)
        if node in derived
    ]


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
        elif _follows(node, derived):
            derived[node] = derived[node.all_input_nodes[0]]
    return derived


def _is_dropped(spec: ReadSpec) -> bool:
    return spec.size > 1 and spec.reshard is Reshard.AFTER_FORWARD


def _follows(node: fx.Node, derived: dict[fx.Node, str]) -> bool:
    """Whether a node depends on nothing but derived values; random results depend on a state, too."""
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    inputs = node.all_input_nodes
    return bool(inputs) and all(source in derived for source in inputs)
