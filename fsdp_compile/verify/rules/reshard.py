"""no-use-after-reshard: gathered memory is freed once, and not used afterwards."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fsdp_compile.ir.graph import require
from fsdp_compile.verify.collective import Collective, Kind
from fsdp_compile.verify.facts import Facts
from fsdp_compile.verify.report import Complaint

RULE = "no-use-after-reshard"


def no_use_after_reshard(facts: Facts) -> list[Complaint]:
    """Checks that each all-gather has its reshard, and that no node uses its memory later."""
    leaving = {gather for node in facts.step.output.all_input_nodes for gather in facts.memory.get(node, ())}
    complaints: list[Complaint] = []
    for gather in facts.of_kind(Kind.GATHER):
        markers = facts.reshards.get(gather.start, [])
        if not markers and gather.start not in leaving:
            complaints.append(_never_resharded(gather))
        complaints.extend(_resharded_again(gather, markers[0], extra) for extra in markers[1:])
        if markers:
            complaints.extend(_partly_resharded(gather, markers[0]))
    return [*complaints, *_used_late(facts)]


def _never_resharded(gather: Collective) -> Complaint:
    what = f"unit {require(gather.start).unit} is never resharded"
    return Complaint(RULE, gather.start, what, "put one fsdp_compile.reshard of all its messages after their last use")


def _resharded_again(gather: Collective, first: fx.Node, again: fx.Node) -> Complaint:
    return Complaint(
        RULE, again, f"%{gather.start} is resharded by %{first} already", "one fsdp_compile.reshard per all-gather"
    )


def _partly_resharded(gather: Collective, marker: fx.Node) -> Iterator[Complaint]:
    forgotten = [wait for wait in gather.all_waits if wait not in marker.all_input_nodes]
    if forgotten:
        yield Complaint(
            RULE,
            marker,
            f"leaves message %{forgotten[0]} of %{gather.start} unsharded",
            "a reshard frees all messages of its all-gather",
        )


def _used_late(facts: Facts) -> Iterator[Complaint]:
    for node, owners in facts.memory.items():
        for gather in owners:
            marker = next(iter(facts.reshards.get(gather, ())), None)
            for user in node.users:
                if marker not in (None, user) and facts.order[user] > facts.order[marker]:
                    yield Complaint(
                        RULE,
                        user,
                        f"uses %{node}, memory of %{gather}, after %{marker} freed it",
                        "reshard after the last use, views included",
                    )
