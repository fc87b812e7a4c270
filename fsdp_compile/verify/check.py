"""The rules, and the check of a graph against all of them, which reports every complaint at once.

The table has the name, sentence and stages of each rule; `docs/invariants.md` explains them.
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
    """One invariant: its name in errors, the sentence that must be true, and the stages after which it must be.

    Stage `None` is that of graphs before all passes.
    """

    name: str
    sentence: str
    find: Callable[[Facts], Iterable[Finding]]
    stages: frozenset[Stage | None] = frozenset({None, *Stage})


_AT_THE_END = frozenset({Stage.FINAL})

RULES: tuple[Rule, ...] = (
    Rule(
        "gather-waited",
        "every message of a collective has exactly one wait, after its start and before any use",
        schedule.gather_waited,
    ),
    Rule(
        "gathered-once",
        "a graph gathers each parameter at most once, and every reader gets that parameter's own elements",
        gathers.gathered_once,
    ),
    Rule(
        "reduced-once",
        "every gradient is averaged once over its own groups and lands at its own place of one flat gradient",
        reductions.reduced_once,
    ),
    Rule(
        "host-copies",
        "shards on the host reach the device in one copy before the gather, and gradients come back in one",
        buffers.host_copies,
    ),
    Rule(
        "markers-gone",
        "no fsdp_compile.unshard or fsdp_compile.reduce_grad is left",
        records.markers_gone,
        frozenset(Stage),
    ),
    Rule(
        "no-use-after-reshard",
        "every all-gather that stays in the graph is resharded once, and its memory is not used afterwards",
        schedule.no_use_after_reshard,
        _AT_THE_END,
    ),
    Rule(
        "nothing-unsharded-saved",
        "no value that only gathered parameters determine is saved for backward, unless an option says so",
        memory.nothing_unsharded_saved,
    ),
    Rule(
        "unsharded-bytes",
        "live gathered bytes stay within the limits at every node",
        memory.unsharded_bytes,
        _AT_THE_END,
    ),
    Rule(
        "plan-order", "collectives of one group are issued in an order that only the graph decides", schedule.plan_order
    ),
    Rule(
        "explicit-prefetch",
        "gathers that a module's list names start where that module's own parameters have arrived",
        schedule.explicit_prefetch,
        _AT_THE_END,
    ),
    Rule(
        "updated-last",
        "an update in backward takes its gradient once, and nothing reads its flat parameter afterwards",
        reductions.updated_last,
        _AT_THE_END,
    ),
    Rule("nothing-rank-specific", "no argument of our nodes depends on the rank", records.nothing_rank_specific),
    Rule(
        "buffers-aligned",
        "slots of a flat parameter are disjoint, and slots and message slices are aligned",
        buffers.buffers_aligned,
    ),
    Rule("typed", "every node of ours carries a record that fits its operator and its graph", records.typed),
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
