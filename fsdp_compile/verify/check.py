"""The rules, and the check of a graph against all of them, which reports every complaint at once.

The table has the name and stages of each rule; `docs/invariants.md` says what each demands, and why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from fsdp_compile.ir.graph import Stage, StepGraph
from fsdp_compile.verify.facts import Facts, Limits
from fsdp_compile.verify.report import Complaint, Finding, refusal
from fsdp_compile.verify.rules import buffers, gathers, memory, records, reductions, schedule


@dataclasses.dataclass(frozen=True)
class Rule:
    """One invariant: its name in errors, what finds breaches, and the stages after which there must be none.

    Stage `None` is that of graphs before all passes.
    """

    name: str
    find: Callable[[Facts], Iterable[Finding]]
    stages: frozenset[Stage | None] = frozenset({None, *Stage})


_AT_THE_END = frozenset({Stage.FINAL})

RULES: tuple[Rule, ...] = (
    Rule("gather-waited", schedule.gather_waited),
    Rule("gathered-once", gathers.gathered_once),
    Rule("reduced-once", reductions.reduced_once),
    Rule("host-copies", buffers.host_copies),
    Rule("markers-gone", records.markers_gone, frozenset(Stage)),
    Rule("no-use-after-reshard", schedule.no_use_after_reshard, _AT_THE_END),
    Rule("nothing-unsharded-saved", memory.nothing_unsharded_saved),
    Rule("unsharded-bytes", memory.unsharded_bytes, _AT_THE_END),
    Rule("plan-order", schedule.plan_order),
    Rule("explicit-prefetch", schedule.explicit_prefetch, _AT_THE_END),
    Rule("updated-last", reductions.updated_last, _AT_THE_END),
    Rule("nothing-rank-specific", records.nothing_rank_specific),
    Rule("buffers-aligned", buffers.buffers_aligned),
    Rule("typed", records.typed),
)


def check(
    step: StepGraph,
    *,
    after: str = "the last pass",
    stage: Stage | None = Stage.FINAL,
    limits: Limits = Limits(),  # noqa: B008  frozen
) -> None:
    """Refuses a graph that breaks a rule for its stage; the error names the pass `after` which it does.

    Raises:
        InvariantError: With rule, node, neighbourhood, source line and hint of the first complaints.
    """
    found = complaints(step, stage=stage, limits=limits)
    if found:
        raise refusal(step, found, after)


def complaints(
    step: StepGraph,
    *,
    stage: Stage | None = Stage.FINAL,
    limits: Limits = Limits(),  # noqa: B008  frozen
    rules: Sequence[Rule] = RULES,
) -> list[Complaint]:
    """All complaints of `rules` about a graph at a stage, in the order of the table."""
    facts = Facts(step, limits)
    return [Complaint(rule.name, *found) for rule in rules if stage in rule.stages for found in rule.find(facts)]
