"""Saves copies of inputs that forward updates, where backward needs them.

A checkpointed batch norm reads its running statistics and returns new ones; a model scales by a counter that it
increments. The partitioner saves such inputs as they are, to recompute in backward what was computed from them; by then
the new values are in their memory. Autograd refuses them where the forward returns new values, and does not notice
where the graph itself writes them.

    %y = sub(%h, %mean); copy_(%mean, %new); return (%y, %h, %mean)
    ->   %old = clone(%mean); %y = sub(%h, %mean); copy_(%mean, %new); return (%y, %h, %old)

So a copy that the model makes, to have the old value in backward, is made as well: to Inductor it is a no-op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fsdp_compile._torch.dynamo import updated_input
from fsdp_compile.ir.edit import infer_value
from fsdp_compile.ir.queries import aliases, written

_CLONE = torch.ops.aten.clone.default


def save_copies_of_updated_inputs(forward: fx.Graph, backward: fx.Graph, results: int) -> None:
    """Replaces updated inputs, and views of them, among what forward saves.

    Args:
        forward: A graph, whose outputs are described if it returns new values.
        backward: Its backward.
        results: How many of the first outputs of `forward` are not saved.
    """
    output = forward.output_node()
    returned = output.args[0]
    assert isinstance(returned, tuple | list)
    updated = frozenset(aliases(_updated_inputs(forward)))
    saved: list[Any] = list(returned[results:])
    copies = {node: _copy(node) for node in saved if node in updated}
    output.args = ((*returned[:results], *(copies.get(node, node) for node in saved)),)
    names = {node.name: copy.name for node, copy in copies.items()}
    for node in backward.find_nodes(op="placeholder"):
        if node.name in names:
            _rename(node, names[node.name])


def _updated_inputs(forward: fx.Graph) -> list[fx.Node]:
    """Inputs whose new values the graph returns, as its outputs are described, or writes, as Inductor asks for."""
    described = forward.output_node().meta.get("desc") or ()
    updated = set(map(updated_input, described)) - {None}
    inside = frozenset(written(forward))
    inputs = forward.find_nodes(op="placeholder")
    return [node for node in inputs if node in inside or node.meta.get("desc") in updated]


def _copy(node: fx.Node) -> fx.Node:
    """A copy of a value, made before the graph writes it."""
    after = node if node.op != "placeholder" else node.graph.find_nodes(op="placeholder")[-1]
    with node.graph.inserting_after(after):
        # The backward's input gets this name too: it has to be free there, where names like "clone" are taken.
        copy = node.graph.create_node("call_function", _CLONE, (node,), name=f"before_update_of_{node.name}")
    copy.meta["val"] = infer_value(copy)
    return copy


def _rename(placeholder: fx.Node, name: str) -> None:
    """Gives an input of backward the name of what forward saves for it, by which it is found."""
    with placeholder.graph.inserting_before(placeholder):
        renamed = placeholder.graph.placeholder(name)
    renamed.meta = placeholder.meta
    placeholder.replace_all_uses_with(renamed)
    placeholder.graph.erase_node(placeholder)
