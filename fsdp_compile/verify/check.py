"""Runs all rules on a graph and reports every complaint at once."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_compile.errors import InvariantError
from fsdp_compile.ir.graph import Stage, StepGraph
from fsdp_compile.verify.facts import Facts
from fsdp_compile.verify.limits import Limits
from fsdp_compile.verify.report import Complaint, hint, summary, where
from fsdp_compile.verify.table import RULES, Rule


def check(
    step: StepGraph,
    *,
    after: str = "the last pass",
    stage: Stage = Stage.FINAL,
    limits: Limits = Limits(),  # noqa: B008  frozen
    rules: Sequence[Rule] = RULES,
) -> None:
    """Refuses a graph that breaks a rule.

    Args:
        step: The graph; it is read, not changed.
        after: Name of the pass that ran last, for the error.
        stage: How far the graph has come: some rules apply only at the end.
        limits: Numbers that the graph must keep to.
        rules: Those that it must not break.

    Raises:
        InvariantError: With rule, node, neighbourhood, source line and hint of the first complaints.
    """
    found = complaints(step, stage=stage, limits=limits, rules=rules)
    if found:
        raise InvariantError(summary(step, found, after), where=where(step, found), instead=hint(found))


def complaints(
    step: StepGraph,
    *,
    stage: Stage = Stage.FINAL,
    limits: Limits = Limits(),  # noqa: B008  frozen
    rules: Sequence[Rule] = RULES,
) -> list[Complaint]:
    """All complaints of `rules` about a graph at a stage, in the order of the table."""
    facts = Facts(step, limits)
    return [complaint for rule in rules if stage in rule.stages for complaint in rule.find(facts)]
