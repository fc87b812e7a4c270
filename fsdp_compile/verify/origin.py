"""Where one element of a tensor comes from: followed backward through our nodes, by plain arithmetic on indices.

    %full[2, 7]  <-  %view[519]  <-  %wait[519]  <-  all_gather: rank 1's message, [7]  <-  %flat[391]

No rule trusts the shape of a pattern: whatever nodes a pass writes between a flat shard and a full parameter, or
between a gradient and the flat gradient, each element must come from its own place. Nodes move whole blocks, so a few
elements of each parameter tell.
"""

from __future__ import annotations

import dataclasses
import math
from operator import getitem

from torch import fx

from fsdp_compile.ir.record import Role, role_of
from fsdp_compile.verify.collective import KINDS, Collective, Kind
from fsdp_compile.verify.facts import shape_of
from fsdp_compile.verify.moves import Step, moved

LONGEST_CHAIN = 1000
"""Nodes between an element and its origin; more means a cycle."""


@dataclasses.dataclass(frozen=True)
class Hop:
    """A collective that an element travels through.

    Attributes:
        collective: The collective.
        rank: For an all-gather, the rank that sends the element.
    """

    collective: Collective
    rank: int | None


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where an element comes from.

    Attributes:
        node: An input, a node of the model's, a full parameter, or a node of ours that computes a new value; `None`
            for a constant zero.
        index: Position among the node's elements, row by row.
        last: The node of ours that is nearest to the origin.
        hops: Collectives on the way, the one nearest to the element first.
    """

    node: fx.Node | None
    index: int
    last: fx.Node
    hops: tuple[Hop, ...]


def origin(node: fx.Node, index: int, rank: int) -> Origin:
    """Follows one element back.

    Args:
        node: The tensor that holds the element.
        index: Position among its elements, row by row.
        rank: The rank, of the shard group, that is looked at: a reduce-scatter gives each rank something else.
    """
    hops: list[Hop] = []
    start = last = node
    for _ in range(LONGEST_CHAIN):
        role = role_of(node)
        if role is None or role is Role.FLAT or (role is Role.FULL and node is not start):
            break
        last = node
        try:
            step = _sent(node, index, rank, hops) or moved(node, index)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            break  # a wrong graph may hold anything; whoever asked complains about where the trail ends
        if step is None:
            break
        if step.source is None:
            return Origin(None, 0, last, tuple(hops))
        node, index = step.source, step.index
    return Origin(node, index, last, tuple(hops))


def _sent(node: fx.Node, index: int, rank: int, hops: list[Hop]) -> Step | None:
    """From an unfinished message to what was sent, which is noted in `hops`; `None` for any other node."""
    start = node.args[0] if node.target is getitem else node
    if not isinstance(start, fx.Node) or start.target not in KINDS:
        return None
    collective = Collective(start, KINDS[start.target])
    message = collective.sent[node.args[1] if start is not node else 0]  # type: ignore[index]
    numel = math.prod(shape_of(message))
    sending = None
    if collective.kind is Kind.GATHER:
        sending, index = divmod(index, numel)
    elif collective.kind is Kind.REDUCE:
        index += rank * (numel // collective.size)
    hops.append(Hop(collective, sending))
    return Step(message, index)
