"""The rules: name, sentence, and the stages of each. `docs/invariants.md` explains them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fsdp_compile.ir.graph import Stage
from fsdp_compile.verify.facts import Facts
from fsdp_compile.verify.report import Complaint
from fsdp_compile.verify.rules import (
    buffers,
    explicit,
    gathers,
    live_bytes,
    offload,
    order,
    records,
    reductions,
    reshard,
    saved,
    updates,
    waits,
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One invariant: its name in errors, the sentence that must be true, and the stages after which it must be."""

    name: str
    sentence: str
    find: Callable[[Facts], list[Complaint]]
    stages: frozenset[Stage] = frozenset(Stage)


_AT_THE_END = frozenset({Stage.FINAL})

RULES: tuple[Rule, ...] = (
    Rule(
        waits.RULE,
        "every message of a collective has exactly one wait, after its start and before any use",
        waits.gather_waited,
    ),
    Rule(
        gathers.RULE,
        "a graph gathers each parameter at most once, and every reader gets that parameter's own elements",
        gathers.gathered_once,
    ),
    Rule(
        reductions.RULE,
        "every gradient is averaged once over its own groups and lands at its own place of one flat gradient",
        reductions.reduced_once,
    ),
    Rule(
        offload.RULE,
        "shards on the host reach the device in one copy before the gather, and gradients come back in one",
        offload.host_copies,
    ),
    Rule(
        records.MARKERS_GONE,
        "no fsdp_compile.unshard or fsdp_compile.reduce_grad is left",
        records.markers_gone,
    ),
    Rule(
        reshard.RULE,
        "every all-gather that stays in the graph is resharded once, and its memory is not used afterwards",
        reshard.no_use_after_reshard,
        _AT_THE_END,
    ),
    Rule(
        saved.RULE,
        "no value that gathered parameters alone determine is saved for backward, unless that was asked for",
        saved.nothing_unsharded_saved,
    ),
    Rule(
        live_bytes.RULE,
        "live gathered bytes stay within the limits at every node",
        live_bytes.unsharded_bytes,
        _AT_THE_END,
    ),
    Rule(
        order.RULE,
        "collectives of one group are issued in an order that the graph alone decides",
        order.plan_order,
    ),
    Rule(
        explicit.RULE,
        "what a module was told to prefetch starts where that module's own parameters have arrived",
        explicit.explicit_prefetch,
        _AT_THE_END,
    ),
    Rule(
        updates.RULE,
        "an update in backward takes its gradient once, and nothing reads its flat parameter afterwards",
        updates.updated_last,
        _AT_THE_END,
    ),
    Rule(
        records.NOTHING_RANK_SPECIFIC,
        "no argument of our nodes depends on the rank",
        records.nothing_rank_specific,
    ),
    Rule(
        buffers.RULE,
        "slots of a flat parameter are disjoint, and slots and message slices are aligned",
        buffers.buffers_aligned,
    ),
    Rule(
        records.TYPED,
        "every node of ours carries a record that fits its operator and its graph",
        records.typed,
    ),
)
