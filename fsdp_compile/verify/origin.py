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

import torch
from torch import fx

from fsdp_compile.ir.record import Role, role_of
from fsdp_compile.verify.collective import KINDS, Collective, Kind
from fsdp_compile.verify.facts import shape_of
from fsdp_compile.verify.moves import Step, moved

aten = torch.ops.aten
_SUMS = (Role.ADD_HELD, Role.ADD_PARTIAL)
_OWN_PART = "fsdp.own_part.default"

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
class Addend:
    """Gradients that were held back, where they are added to new ones.

    Attributes:
        at: The node that adds.
        node: What is added.
        index: Position of the element that is.
        hops: Collectives between this sum and the element that was asked for.
    """

    at: fx.Node
    node: fx.Node
    index: int
    hops: int


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where an element comes from.

    Attributes:
        node: An input, a node of the model's, a full parameter, or a node of ours that computes a new value; `None`
            for a constant zero.
        index: Position among the node's elements, row by row.
        last: The node of ours that is nearest to the origin.
        hops: Collectives on the way, the one nearest to the element first.
        addends: What was added on the way, nearest to the element first.
        divisor: What it was divided by on the way.
    """

    node: fx.Node | None
    index: int
    last: fx.Node
    hops: tuple[Hop, ...]
    addends: tuple[Addend, ...] = ()
    divisor: float = 1.0


def origin(node: fx.Node, index: int, rank: int) -> Origin:
    """Follows one element back.

    Args:
        node: The tensor that holds the element.
        index: Position among its elements, row by row.
        rank: The rank, of the shard group, that is looked at: a reduce-scatter gives each rank something else.
    """
    hops: list[Hop] = []
    addends: list[Addend] = []
    divisor = 1.0
    start = last = node
    for _ in range(LONGEST_CHAIN):
        role = role_of(node)
        if role is None or node.op == "placeholder" or (role is Role.FULL and node is not start):
            break
        last = node
        if role in _SUMS and node.target is aten.add.Tensor and len(node.all_input_nodes) == 2:
            held, node = node.args[:2]  # type: ignore[assignment]
            addends.append(Addend(last, held, index, len(hops)))  # type: ignore[arg-type]
            continue
        if node.target is aten.div.Tensor and isinstance(node.args[1], int | float):
            divisor *= node.args[1]
            node = node.args[0]  # type: ignore[assignment]
            continue
        try:
            step = _sent(node, index, rank, hops) or _own_part(node, index, rank) or moved(node, index)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            break  # a wrong graph may hold anything; whoever asked complains about where the trail ends
        if step is None:
            break
        if step.source is None:
            return Origin(None, 0, last, tuple(hops), tuple(addends), divisor)
        node, index = step.source, step.index
    return Origin(node, index, last, tuple(hops), tuple(addends), divisor)


def _own_part(node: fx.Node, index: int, rank: int) -> Step | None:
    """From the part of a message that a rank keeps to the message; `None` for any other node."""
    if str(node.target) != _OWN_PART:
        return None
    part = math.prod(shape_of(node))
    return Step(node.args[0], rank % (math.prod(shape_of(node.args[0])) // part) * part + index)  # type: ignore[arg-type]


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
