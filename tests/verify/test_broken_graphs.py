"""Each rule catches what it is for, and no rule is spare."""

from __future__ import annotations

import pytest

from fsdp_compile.verify.check import RULES, complaints
from tests.verify.average_breaks import AVERAGE_BREAKS as OF_AVERAGES
from tests.verify.breaks import BREAKS as OF_UNITS
from tests.verify.breaks import Break
from tests.verify.joined_breaks import BREAKS as OF_JOINED_UNITS
from tests.verify.lookup_breaks import LOOKUP_BREAKS as OF_LOOKUPS
from tests.verify.memory_breaks import BREAKS as OF_MEMORY
from tests.verify.record_breaks import BREAKS as OF_RECORDS
from tests.verify.update_breaks import UPDATE_BREAKS as OF_UPDATES

BREAKS = (*OF_UNITS, *OF_MEMORY, *OF_RECORDS, *OF_AVERAGES, *OF_JOINED_UNITS, *OF_LOOKUPS, *OF_UPDATES)


@pytest.mark.parametrize("broken", BREAKS, ids=[b.name for b in BREAKS])
def test_a_broken_graph_is_caught_by_its_rule_at_its_node(broken: Break) -> None:
    step = broken.graph()
    assert complaints(step, stage=broken.stage) == []

    named = broken.edit(step)

    found = complaints(step, stage=broken.stage, limits=broken.limits)
    assert any(c.rule == broken.rule and c.node is named and broken.says in c.what for c in found), found


@pytest.mark.parametrize("rule", RULES, ids=[r.name for r in RULES])
def test_without_a_rule_some_broken_graph_passes(rule: object) -> None:
    others = [r for r in RULES if r is not rule]
    unnoticed = []
    for broken in (b for b in BREAKS if b.rule == rule.name):  # type: ignore[attr-defined]
        step = broken.graph()
        broken.edit(step)
        if not complaints(step, stage=broken.stage, limits=broken.limits, rules=others):
            unnoticed.append(broken.name)
    assert unnoticed
