"""explicit-prefetch: what a module was told to prefetch starts where that module's own parameters are complete."""

from __future__ import annotations

from fsdp_compile.ir.graph import require
from fsdp_compile.verify.facts import Facts, is_models
from fsdp_compile.verify.report import Complaint

RULE = "explicit-prefetch"


def explicit_prefetch(facts: Facts) -> list[Complaint]:
    """Checks each gather that a list names: after the wait that it follows, before anything is computed."""
    complaints = []
    for gather, by in facts.named_by.items():
        unit, owner = require(gather).unit, require(by.start).unit
        after = max(facts.order[wait] for wait in by.all_waits)
        start = facts.order[gather]
        between = next((node for node in facts.nodes[after + 1 : start] if is_models(node)), None)
        if start < after or between is not None:
            early = "before its parameters have arrived" if start < after else f"after %{between}"
            complaints.append(
                Complaint(
                    RULE,
                    gather,
                    f"gathers {unit}, which {owner} was told to prefetch, {early}",
                    f"start it right after the wait for {owner}",
                )
            )
    return complaints
