"""gather-waited: every message of a collective is waited for once, and not read before."""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem

from torch import fx

from fsdp_compile.ir.graph import role_of
from fsdp_compile.verify.collective import WAIT, Collective
from fsdp_compile.verify.facts import Facts
from fsdp_compile.verify.report import Complaint

RULE = "gather-waited"


def gather_waited(facts: Facts) -> list[Complaint]:
    """Checks all-gathers, reduce-scatters and all-reduces alike."""
    return [*(complaint for c in facts.collectives for complaint in _complaints(c)), *_out_of_order(facts)]


def _complaints(collective: Collective) -> Iterator[Complaint]:
    kind = collective.kind.value
    if collective.is_grouped:
        for user in collective.start.users:
            if user.target is not getitem:
                yield _early(user, collective.start, kind)
    for index, (unfinished, waits) in enumerate(zip(collective.unfinished, collective.waits, strict=True)):
        for node in unfinished:
            for user in node.users:
                if user.target is not WAIT:
                    yield _early(user, node, kind)
        if not waits:
            message = f"message {index} of " if collective.is_grouped else ""
            yield Complaint(
                RULE,
                collective.start,
                f"nobody waits for {message}this {kind}",
                "add one wait_tensor before the first use, or do not start it",
            )
        for extra in waits[1:]:
            yield Complaint(
                RULE, extra, f"%{waits[0]} waits for the same {kind} already", "let all readers use the first wait"
            )


def _early(user: fx.Node, message: fx.Node, kind: str) -> Complaint:
    return Complaint(
        RULE, user, f"uses %{message} while its {kind} may still be running", "use the result of its wait_tensor"
    )


def _out_of_order(facts: Facts) -> Iterator[Complaint]:
    """Nodes before one of their inputs, where either is ours."""
    for node, _ in facts.ours:
        for user in node.users:
            if facts.order[user] < facts.order[node]:
                yield Complaint(RULE, user, f"stands before %{node}, whose result it uses", "start, wait, use")
        for source in node.all_input_nodes:
            if role_of(source) is None and facts.order[source] > facts.order[node]:
                yield Complaint(RULE, node, f"stands before %{source}, whose result it uses", "start, wait, use")
