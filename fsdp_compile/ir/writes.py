"""What the program's own writes say about order: AOTAutograd writes new values of inputs at the end of a graph.

    %scaled = mul(%g, %scale); %new = mul(%scale, 2); copy_(%scale, %new)

Behind its write, a node that reads the old value would read the new one.
"""

from __future__ import annotations

from torch import fx

from fsdp_compile.ir.graph import role_of
from fsdp_compile.ir.queries import aliases, is_alias


def is_write(node: fx.Node) -> bool:
    """Whether a node of the program writes into an argument, by its operator's schema."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and role_of(node) is None


def written(graph: fx.Graph) -> list[fx.Node]:
    """The nodes whose memory the program writes, by themselves or through views."""
    return [_base(target) for node in graph.nodes if is_write(node) for target in _targets(node)]


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
