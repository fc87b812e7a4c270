"""host-copies: shards on the host reach the device in one copy before the gather, and gradients come back in one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fsdp_compile.ir.graph import Role, require, role_of
from fsdp_compile.ops.host_copy import START_COPY, WAIT_COPY
from fsdp_compile.verify.collective import Kind
from fsdp_compile.verify.facts import Facts
from fsdp_compile.verify.report import Complaint

RULE = "host-copies"
_START = START_COPY
_WAIT = WAIT_COPY
_WAIT_OF = {Role.OFFLOAD_IN: Role.OFFLOAD_IN_WAIT, Role.OFFLOAD_OUT: Role.OFFLOAD_OUT_WAIT}
_OPERATOR = {**dict.fromkeys(_WAIT_OF, _START), **dict.fromkeys(_WAIT_OF.values(), _WAIT)}


def host_copies(facts: Facts) -> list[Complaint]:
    """Checks both directions, and that no node reads a copy before it is complete."""
    return [*_inward(facts), *_outward(facts), *_wrong_operators(facts), *_wrong_copies(facts)]


def _inward(facts: Facts) -> Iterator[Complaint]:
    sent = [m for gather in facts.of_kind(Kind.GATHER) for m in gather.sent]
    alone = [node for node in facts.of_role(Role.FULL) if require(node).specs[0].size == 1]
    for node in (*sent, *alone):
        if role_of(node) is None:
            continue  # the rule `typed` says what is wrong
        record, ways = require(node), _ways(node)
        compute, names = record.specs[0].compute, ", ".join(record.parameters)
        if any(len(way) != bool(compute) for way in ways) or len(ways) > 1:
            counts = {len(way) for way in ways}
            copies = " or ".join(map(str, sorted(counts))) if len(counts) > 1 else str(len(frozenset.union(*ways)))
            yield Complaint(
                RULE,
                node,
                f"reaches its readers after {copies} copies from the host",
                f"{names}: one copy to {compute!r}" if compute else f"{names}: none, its shard is on the device",
            )


def _ways(node: fx.Node) -> frozenset[frozenset[fx.Node]]:
    """The copies from the host between the flat parameter and `node`; a quantized message has two, by its scales."""
    role = role_of(node)
    if role is Role.FLAT:
        return frozenset([frozenset()])
    # A parameter that is still unsharded is on the device: no path leads to it from a flat parameter.
    if role not in (Role.SHARD, Role.OFFLOAD_IN, Role.OFFLOAD_IN_WAIT, Role.COPY_OUT, Role.FULL):
        return frozenset()
    own = frozenset([node] if role is Role.OFFLOAD_IN else [])
    return frozenset(way | own for source in node.all_input_nodes for way in _ways(source))


def _outward(facts: Facts) -> Iterator[Complaint]:
    for gradient in facts.of_role(Role.FLAT_GRADIENT):
        copied = role_of(gradient.all_input_nodes[0]) is Role.OFFLOAD_OUT_WAIT
        if copied != bool(require(gradient).specs[0].compute):
            yield Complaint(
                RULE,
                gradient,
                "is not copied to the host" if not copied else "is copied to the host",
                "a flat gradient is where its flat parameter is",
            )
    for wait in facts.of_role(Role.OFFLOAD_OUT_WAIT):
        for user in wait.users:
            if role_of(user) is not Role.FLAT_GRADIENT:
                yield Complaint(
                    RULE,
                    user,
                    f"reads %{wait}, which may still be on its way to the host",
                    "read what was copied: the host waits when the graph has run",
                )


def _wrong_operators(facts: Facts) -> Iterator[Complaint]:
    """Copies that are recorded as something else, and the other way round."""
    for node in facts.nodes:
        role = role_of(node)
        if (node.target in (_START, _WAIT) or role in _OPERATOR) and _OPERATOR.get(role) is not node.target:  # type: ignore[arg-type]
            recorded = "carries no record" if role is None else f"is recorded as {role.value}"
            yield Complaint(
                RULE,
                node,
                f"{recorded} and does something else",
                "start_copy and wait_copy alone copy between host and device, overlapping what is computed",
            )


def _wrong_copies(facts: Facts) -> Iterator[Complaint]:
    """Copies to the wrong place, and copies that are read or overwritten before they are waited for."""
    for node in facts.of_role(*_WAIT_OF):
        role = require(node).role
        if node.target is not _START:
            continue
        wanted = require(node).specs[0].compute if role is Role.OFFLOAD_IN else "cpu"
        if node.args[1] != wanted:
            yield Complaint(RULE, node, f"copies to {node.args[1]!r}", f"{role.value} copies to {wanted!r}")
        waits = [user for user in node.users if user.target is _WAIT and user.args[0] is node]
        if len(waits) != 1:
            yield Complaint(
                RULE, node, f"is waited for {len(waits)} times", "one fsdp_compile.wait_copy, which all readers use"
            )
        for user in node.users:
            if user not in waits:
                yield Complaint(
                    RULE, user, f"reads %{node} while it may still be on its way", "use the result of its wait_copy"
                )
        for wait in waits:
            if role_of(wait) is not _WAIT_OF[role]:
                yield Complaint(RULE, wait, f"waits for {role.value}", f"it is {_WAIT_OF[role].value}")
            if role is Role.OFFLOAD_OUT and wait.args[1:] != (node.args[0],):
                yield Complaint(
                    RULE,
                    wait,
                    f"lets go of %{node.args[0]} while it may still be copied",
                    "a wait takes what was copied as well, so that its memory is not reused before",
                )
