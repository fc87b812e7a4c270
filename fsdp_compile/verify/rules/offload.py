"""host-copies: shards on the host reach the device in one copy before the gather, and gradients come back in one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fsdp_compile.ir.record import Role, require, role_of
from fsdp_compile.verify.collective import Kind
from fsdp_compile.verify.complaint import Complaint
from fsdp_compile.verify.facts import Facts

RULE = "host-copies"
_COPY = torch.ops.aten._to_copy.default


def host_copies(facts: Facts) -> list[Complaint]:
    """Checks both directions, and that nobody reads what may still be on its way to the host."""
    return [*_inward(facts), *_outward(facts), *_wrong_copies(facts)]


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
    """The copies from the host on each way from the flat shard to `node`; a quantized message has two, by its scales.

    A parameter that stayed gathered is on the device: no way leads to it from a flat shard.
    """
    role = role_of(node)
    if role is Role.FLAT:
        return frozenset([frozenset()])
    if role not in (Role.SHARD, Role.OFFLOAD_IN, Role.COPY_OUT, Role.FULL):
        return frozenset()
    own = frozenset([node] if role is Role.OFFLOAD_IN else [])
    return frozenset(way | own for source in node.all_input_nodes for way in _ways(source))


def _outward(facts: Facts) -> Iterator[Complaint]:
    for gradient in facts.of_role(Role.FLAT_GRADIENT):
        copied = role_of(gradient.all_input_nodes[0]) is Role.OFFLOAD_OUT
        if copied != bool(require(gradient).specs[0].compute):
            yield Complaint(
                RULE,
                gradient,
                "is not copied to the host" if not copied else "is copied to the host",
                "a flat gradient is where its flat shard is",
            )
    for copy in facts.of_role(Role.OFFLOAD_OUT):
        for user in copy.users:
            if role_of(user) is not Role.FLAT_GRADIENT:
                yield Complaint(
                    RULE, user, f"reads %{copy}, which may still be on its way to the host", "read what was copied"
                )


def _wrong_copies(facts: Facts) -> Iterator[Complaint]:
    for node in facts.of_role(Role.OFFLOAD_IN, Role.OFFLOAD_OUT):
        inward = role_of(node) is Role.OFFLOAD_IN
        wanted = require(node).specs[0].compute if inward else "cpu"
        device = node.kwargs.get("device")
        to = device.type if isinstance(device, torch.device) else None
        if node.target is not _COPY or to != wanted or node.kwargs.get("non_blocking") is not True:
            yield Complaint(
                RULE,
                node,
                f"is recorded as {require(node).role.value} and does something else",
                f"aten._to_copy(..., device={wanted!r}, non_blocking=True): the host does not wait for each",
            )
