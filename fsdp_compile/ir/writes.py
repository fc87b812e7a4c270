"""What writes and effects say about order: AOTAutograd writes new values of inputs at the end of a graph.

    %scaled = mul(%g, %scale); %new = mul(%scale, 2); copy_(%scale, %new)

Behind its write, a node that reads the old value would read the new one; so it is with an update in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile.ir.graph import role_of
from fsdp_compile.ir.queries import aliases, is_alias, is_known_to_repeat, is_own_collective, readers


def is_write(node: fx.Node) -> bool:
    """Whether a node writes into an argument, by its operator's schema."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def has_effect(node: fx.Node) -> bool:
    """Whether a node of the program writes, sends, may draw random numbers or does anything else but compute."""
    if node.op != "call_function" or role_of(node) is not None or node.target is collectives.wait_tensor.default:
        return False
    return is_own_collective(node) or is_write(node) or not is_known_to_repeat(node.target) or node.is_impure()


def kept_order(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of nodes of which the first has to stay in front of the other, though it does not read it."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    yield from pairwise(filter(has_effect, order))
    for write in filter(is_write, order):
        for node in readers([_base(target) for target in _targets(write)]):
            if node is not write:
                yield (node, write) if order[node] < order[write] else (write, node)


def written(graph: fx.Graph) -> list[fx.Node]:
    """The nodes whose memory the program writes, by themselves or through views."""
    writes = (node for node in graph.nodes if is_write(node) and role_of(node) is None)
    return [_base(target) for node in writes for target in _targets(node)]


def tied_to_writes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes that read or show memory which the program writes: across the write, they would read another value."""
    return frozenset(node for held in aliases(written(graph)) for node in (held, *held.users))


def _targets(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node writes."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {**{a.name: value for a, value in zip(arguments, node.args, strict=False)}, **node.kwargs}
    written = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    each = [value for one in written for value in (one if isinstance(one, list | tuple) else [one])]
    return [value for value in each if isinstance(value, fx.Node)]


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while is_alias(node):
        node = node.all_input_nodes[0]
    return node
