"""The collectives at the ends of a graph, taken out of it so that they run while graphs of other units compute.

A graph of one block could overlap its all-gather with nothing, since all that it computes needs the parameters:

    planned     cast, all_gather, wait, compute, reduce_scatter, wait, divide
    head        cast, all_gather                        may run before the graph of the block before has computed
    graph              wait(running), compute, reduce_scatter
    tail                                               wait, divide         runs after the next graph has computed

The graph takes running all-gathers as its last inputs, and waits for each where it needs its message; it returns
running reductions as its last outputs. Head and tail are graphs of their own, which run operator by operator
(`fsdp2/pipeline.py` says when).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fsdp_compile._torch.dynamo import LazyGraphModule
from fsdp_compile.cost.timeline import waits_of
from fsdp_compile.fsdp2.pipeline import Gather, Head, Tail
from fsdp_compile.ir.graph import SENT, Role, StepGraph, require, role_of
from fsdp_compile.ir.queries import flat_of, with_sources
from fsdp_compile.layout.spec import Reshard

_HEAD = frozenset({*SENT, Role.GATHER, Role.GATHER_ITEM})
_OVER_REPLICAS = (Role.REPLICATE, Role.REPLICATE_ITEM, Role.REPLICATE_WAIT)
# No copies of gradients to the host, which waits for them where their graph ends.
_TAIL = frozenset({Role.REDUCE_WAIT, *_OVER_REPLICAS, Role.SHARD_GRADIENT, Role.FLAT_GRADIENT})


def take_head(step: StepGraph, ahead: int | None, *, has_backward: bool) -> tuple[Head | None, list[torch.Tensor]]:
    """Takes the all-gathers of the first unit out of a graph, which takes them running as further inputs.

    They may start `ahead` graphs before it.

    Returns:
        The head, if there are any, and of parameter groups; and stand-ins of what runs.
    """
    starts = list(step.nodes(Role.GATHER))
    if not starts:
        return None, []
    units = set(require(starts[0]).units)
    inputs = step.graph.find_nodes(op="placeholder")
    last, gathers, messages = inputs[-1], list[Gather](), list[fx.Node]()
    first = {start: waits_of(start) for start in starts if units & set(require(start).units)}
    sources = {start: with_sources([start]) for start in first}
    read = [node for node in inputs if any(node in each for each in sources.values())]
    computed = set().union(*sources.values()).difference(inputs)
    if any(role_of(node) not in _HEAD for node in computed) or any(role_of(node) is not Role.FLAT for node in read):
        return None, []
    for start, waits in first.items():
        running = [wait.all_input_nodes[0] for wait in waits]
        flats = [node for node in read if node in sources[start]]
        taken = {*sources[start], *running}
        graph = _graph_of(step, flats, [node for node in step.graph.nodes if node in taken], running)
        nbytes = sum(node.meta["val"].nbytes for node in running)
        gathers.append(Gather(graph.code, graph, tuple(map(inputs.index, flats)), nbytes))
        for wait, node in zip(waits, running, strict=True):
            with step.graph.inserting_after(last):
                last = step.graph.placeholder(f"gathering_{len(messages)}")
            last.meta.update(node.meta)
            wait.replace_input_with(node, last)
            messages.append(last)
    for node in reversed(list(step.graph.nodes)):
        if (node in computed or role_of(node) is Role.GATHER_ITEM) and node.op != "placeholder" and not node.users:
            step.graph.erase_node(node)
    is_open = all(spec.reshard is Reshard.AUTO for flat in read for spec in require(flat).specs)
    head = Head(tuple(gathers), ahead, has_backward and ahead is None and is_open)
    return head, [message.meta["val"] for message in messages]


def take_tail(step: StepGraph) -> Tail | None:
    """Takes what follows the last unit's reductions out of a planned backward, which returns them while they run.

    Returns:
        `None` if there are none, or if something else than gradients of parameter groups depends on them.
    """
    waits = list(step.nodes(Role.REDUCE_WAIT))
    if not waits:
        return None
    units = set(require(waits[-1]).units)
    taken: dict[fx.Node, int] = {}  # with the number of their stage
    for node in step.graph.nodes:
        before = [taken[source] for source in node.all_input_nodes if source in taken]
        if node.op == "output" or not (before or (node in waits and units & set(require(node).units))):
            continue
        if role_of(node) not in _TAIL:
            return None
        taken[node] = max(before, default=0) + (role_of(node) is Role.REPLICATE_WAIT)
    results: list[Any] = list(step.output.args[0])  # type: ignore[arg-type]
    outputs = [i for i, node in enumerate(results) if node in taken]
    gradients = [results[i] for i in outputs]
    running = list(dict.fromkeys(source for node in taken for source in node.all_input_nodes if source not in taken))
    inputs = step.graph.find_nodes(op="placeholder")
    if any(role_of(node) is not Role.FLAT_GRADIENT for node in gradients) or not set(inputs).isdisjoint(running):
        return None
    # Inductor would use the memory of a message again, which is sent until a wait that it does not see.
    starts = [node for node in step.nodes(Role.REDUCE) if not {node, *node.users}.isdisjoint(running)]
    running = list(dict.fromkeys([*running, *(sent for node in starts for sent in node.all_input_nodes)]))
    stages = []
    given = running
    for number in range(max(taken.values()) + 1):
        own = [node for node, stage in taken.items() if stage == number]
        later = [source for node, stage in taken.items() if stage > number for source in node.all_input_nodes]
        made = dict.fromkeys(node for node in (*later, *gradients) if node in given or node in own)
        stages.append(_graph_of(step, given, own, list(made) if later else gradients))
        given = list(made)
    place = {flat_of(require(node)): i for i, node in enumerate(inputs) if role_of(node) is Role.FLAT}
    step.output.args = ((*(None if i in outputs else node for i, node in enumerate(results)), *running),)
    for node in reversed(taken):
        step.graph.erase_node(node)
    return Tail(tuple(stages), len(running), tuple(outputs), tuple(place[flat_of(require(n))] for n in gradients))


def _graph_of(
    step: StepGraph, inputs: Sequence[fx.Node], nodes: Iterable[fx.Node], results: Iterable[fx.Node]
) -> fx.GraphModule:
    """A graph of some nodes of another, whose code says nothing of their names."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"given_{number}") for number, node in enumerate(inputs)}
    for node in nodes:
        if node not in copies:
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = graph.create_node(node.op, node.target, args, kwargs)
    graph.output(tuple(copies[node] for node in results))
    return LazyGraphModule(step.gm, graph)
