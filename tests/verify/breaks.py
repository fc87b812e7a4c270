"""Correct graphs, each broken by one edit, and the rule that has to notice."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.distributed.fsdp import BackwardPrefetch

from fsdp_compile.config.prefetch import FSDPPrefetch
from fsdp_compile.ir.graph import KEY, Phase, Role, Stage, StepGraph, require, role_of
from fsdp_compile.layout.flat_layout import ReduceLayout
from fsdp_compile.verify.facts import Limits
from tests.verify.captured import World
from tests.verify.graphs import FOUR_BITS, KEPT, OPEN, PAIR, QUANTIZED, SQUARE, graph

aten = torch.ops.aten
NO_LIMITS = Limits()
ALONE = Limits(alone=True)
AS_FSDP2 = Limits(reduce_layout=ReduceLayout.FSDP2)
POST = FSDPPrefetch(backward=BackwardPrefetch.BACKWARD_POST)
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


@dataclasses.dataclass(frozen=True)
class Break:
    rule: str  # that has to notice
    edit: Callable[[StepGraph], fx.Node]  # breaks the graph and returns the node that the complaint has to name
    phase: Phase
    says: str  # a part of the complaint
    model: str = "stack"  # in `MODELS`
    world: World = PAIR
    stage: Stage = Stage.FINAL  # how far the graph has come when it is broken
    limits: Limits = NO_LIMITS
    prefetch: int | FSDPPrefetch = 1  # by which it was scheduled
    bucket_mb: float = 0

    @property
    def name(self) -> str:
        kept = "-kept-if-there-is-room" * (self.world is OPEN)
        return f"{self.rule}-{self.edit.__name__}{kept}"

    def graph(self) -> StepGraph:
        """The graph before it is broken."""
        how = {name: getattr(self, name) for name in ("model", "world", "stage", "prefetch", "bucket_mb")}
        return graph(self.phase, layout=self.limits.reduce_layout, **how)


BREAKS: list[Break] = []
Edit = Callable[[StepGraph], fx.Node]


def breaks(rule: str, phase: Phase, says: str, **how: Any) -> Callable[[Edit], Edit]:
    """Adds an edit to `BREAKS`, with the arguments of a `Break`."""

    def add(edit: Edit) -> Edit:
        BREAKS.append(Break(rule, edit, phase, says, **how))
        return edit

    return add


def input_of(node: fx.Node, position: int = 0) -> fx.Node:
    source = node.args[position]
    assert isinstance(source, fx.Node)
    return source


def nodes_of(step: StepGraph, role: Role) -> list[fx.Node]:
    return list(step.nodes(role))


def last_of(step: StepGraph, role: Role) -> fx.Node:
    return nodes_of(step, role)[-1]


def users_of(node: fx.Node, role: Role) -> list[fx.Node]:
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    return sorted((u for u in node.users if role_of(u) is role), key=order.__getitem__)


def copied(node: fx.Node, replaced: dict[fx.Node, fx.Node], after: fx.Node) -> fx.Node:
    """A second node like `node`, some of its inputs replaced."""
    with node.graph.inserting_after(after):
        return node.graph.node_copy(node, lambda n: replaced.get(n, n))


def _copy_collective(start: fx.Node, after: fx.Node) -> dict[fx.Node, fx.Node]:
    """A second collective like the grouped one at `start`, with items and waits, behind `after`."""
    replaced = {start: copied(start, {}, after)}
    last = replaced[start]
    for item in [u for u in start.users if u.target is getitem]:
        last = replaced[item] = copied(item, replaced, last)
        for wait in item.users:
            last = replaced[wait] = copied(wait, replaced, last)
    return replaced


def _messages(start: fx.Node) -> list[fx.Node]:
    return [wait for item in start.users for wait in item.users]


@breaks("gather-waited", FORWARD, "stands before")
@breaks("gather-waited", FORWARD, "stands before", bucket_mb=1)
def wait_moved_after_its_use(step: StepGraph) -> fx.Node:
    wait = last_of(step, Role.GATHER_WAIT)
    use = next(iter(wait.users))
    use.append(wait)
    return use


@breaks("gather-waited", FORWARD, "may still be running")
def unfinished_message_read(step: StepGraph) -> fx.Node:
    wait = last_of(step, Role.GATHER_WAIT)
    use = users_of(wait, Role.COPY_OUT)[0]
    use.replace_input_with(wait, input_of(wait))
    return use


@breaks("gather-waited", BACKWARD, "nobody waits")
def message_never_waited_for(step: StepGraph) -> fx.Node:
    wait = last_of(step, Role.REDUCE_WAIT)
    item = input_of(wait)
    wait.replace_all_uses_with(item)
    step.graph.erase_node(wait)
    return input_of(item)


@breaks("gather-waited", BACKWARD, "waits for the same")
def message_waited_for_twice(step: StepGraph) -> fx.Node:
    wait = last_of(step, Role.REDUCE_WAIT)
    return copied(wait, {}, wait)


@breaks("gathered-once", FORWARD, "gathers already")
def unit_gathered_twice(step: StepGraph) -> fx.Node:
    start = nodes_of(step, Role.GATHER)[-1]
    waits = _messages(start)
    replaced = _copy_collective(start, waits[-1])
    reshard = next(u for u in waits[0].users if role_of(u) is Role.RESHARD)
    copied(reshard, replaced, reshard)
    reader = users_of(waits[-1], Role.COPY_OUT)[-1]
    reader.replace_input_with(waits[-1], replaced[waits[-1]])
    return replaced[start]


@breaks("gathered-once", BACKWARD, "holds already", world=OPEN)
def kept_parameter_gathered_again(step: StepGraph) -> fx.Node:
    """What is taken for another kept parameter is one that this graph gathers."""
    gather = last_of(step, Role.GATHER)
    record = require(gather)
    saved = last_of(step, Role.SAVED_PARAM)
    saved.meta[KEY] = dataclasses.replace(
        record, role=Role.SAVED_PARAM, parameters=record.parameters[:1], specs=record.specs[:1]
    )
    return gather


@breaks("gathered-once", FORWARD, "element 0 is")
def copy_out_of_the_neighbour(step: StepGraph) -> fx.Node:
    """The slice out of a packed message starts at another parameter."""
    full = next(n for n in step.nodes(Role.FULL) if require(n).parameters[0].endswith("norm.bias"))
    part = full
    while part.target is not aten.slice.Tensor:
        part = input_of(part)
    width = part.args[3] - part.args[2]  # type: ignore[operator]
    part.args = (*part.args[:2], part.args[2] - width, part.args[2], *part.args[4:])  # type: ignore[operator]
    return full


@breaks("gathered-once", FORWARD, "'fsdp.shard.7'")
def gather_over_another_group(step: StepGraph) -> fx.Node:
    start = nodes_of(step, Role.GATHER)[-1]
    start.update_arg(2, "fsdp.shard.7")
    return start


@breaks("gathered-once", BACKWARD, "'fsdp.shard.0'", world=KEPT)
def parts_gathered_over_the_whole_group(step: StepGraph) -> fx.Node:
    start = nodes_of(step, Role.GATHER)[-1]
    start.update_arg(2, "fsdp.shard.0")
    return start


@breaks("gathered-once", BACKWARD, "another parameter", world=KEPT)
def parts_swapped_in_backward(step: StepGraph) -> fx.Node:
    """The parts of two parameters of one shape change places in a grouped all-gather."""
    start = nodes_of(step, Role.GATHER)[-1]
    parts = list(start.all_input_nodes)
    a, b = (next(i for i, n in enumerate(parts) if require(n).parameters[0].endswith(e)) for e in _NORM)
    parts[a], parts[b] = parts[b], parts[a]
    start.update_arg(0, parts)
    return next(n for n in step.nodes(Role.FULL) if require(n).parameters[0] == "blocks.0.norm.weight")


_NORM = ("norm.weight", "norm.bias")


@breaks("gathered-once", FORWARD, "has the scale of", world=FOUR_BITS)
@breaks("gathered-once", FORWARD, "has the scale of", world=QUANTIZED)
def scales_of_another_parameter(step: StepGraph) -> fx.Node:
    first, second = _dequantized(step)[:2]
    first.replace_input_with(input_of(first, 1), input_of(second, 1))
    return _reader(first)


@breaks("gathered-once", FORWARD, "is read as", world=FOUR_BITS)
@breaks("gathered-once", FORWARD, "is read as", world=QUANTIZED)
def numbers_of_another_dtype(step: StepGraph) -> fx.Node:
    node = _dequantized(step)[0]
    node.update_arg(2, "float8_e4m3fn")
    return _reader(node)


def _dequantized(step: StepGraph) -> list[fx.Node]:
    return [node for node in nodes_of(step, Role.COPY_OUT) if node.target is torch.ops.fsdp_compile.dequantize.default]


def _reader(node: fx.Node) -> fx.Node:
    while role_of(node) is not Role.FULL:
        node = next(iter(node.users))
    return node


@breaks("host-copies", BACKWARD, "is copied to the host")
def gradient_copied_to_where_it_is(step: StepGraph) -> fx.Node:
    joined = last_of(step, Role.FLAT_GRADIENT)
    flat_gradient, value = require(joined), joined.meta["val"]
    with step.graph.inserting_after(joined):
        copy = step.graph.call_function(torch.ops.fsdp_compile.start_copy.default, (joined, "cpu"))
    with step.graph.inserting_after(copy):
        wait = step.graph.call_function(torch.ops.fsdp_compile.wait_copy.default, (copy, joined))
    with step.graph.inserting_after(wait):
        view = step.graph.call_function(aten.view.default, (wait, list(value.shape)))
    joined.replace_all_uses_with(view, delete_user_cb=lambda user: user not in (copy, wait))
    copies = {copy: Role.OFFLOAD_OUT, wait: Role.OFFLOAD_OUT_WAIT}
    roles = {joined: Role.SHARD_GRADIENT, **copies, view: Role.FLAT_GRADIENT}
    for node, role in roles.items():
        node.meta.update(val=value, **{KEY: dataclasses.replace(flat_gradient, role=role)})
    return view


@breaks("reduced-once", BACKWARD, "reduces already")
def gradient_reduced_twice(step: StepGraph) -> fx.Node:
    """A second reduce-scatter of the same messages, whose results are added to the first one's."""
    start = last_of(step, Role.REDUCE)
    waits = _messages(start)
    replaced = _copy_collective(start, waits[-1])
    flat = next(iter(waits[0].users))
    with step.graph.inserting_before(flat):
        total = step.graph.call_function(aten.add.Tensor, (waits[0], replaced[waits[0]]))
    total.meta.update(waits[0].meta)
    total.meta[KEY] = dataclasses.replace(require(waits[0]), role=Role.SHARD_GRADIENT)
    flat.replace_input_with(waits[0], total)
    return replaced[start]


@breaks("reduced-once", BACKWARD, "combined by 'sum'")
def gradient_summed_instead_of_averaged(step: StepGraph) -> fx.Node:
    start = last_of(step, Role.REDUCE)
    start.update_arg(1, "sum")
    return start


@breaks("reduced-once", BACKWARD, "'fsdp.replicate.0'")
def gradient_reduced_over_another_group(step: StepGraph) -> fx.Node:
    start = last_of(step, Role.REDUCE)
    start.update_arg(3, "fsdp.replicate.0")
    return start


@breaks("reduced-once", BACKWARD, "reaches no output")
def reduced_gradient_dropped(step: StepGraph) -> fx.Node:
    """Zeros take the place of a reduced shard."""
    start = last_of(step, Role.REDUCE)
    wait = _messages(start)[-1]
    flat = next(iter(wait.users))
    with step.graph.inserting_before(flat):
        zeros = step.graph.call_function(aten.new_zeros.default, (wait, [wait.meta["val"].numel()]))
    zeros.meta = {**wait.meta, KEY: dataclasses.replace(require(wait), role=Role.SHARD_GRADIENT)}
    flat.replace_input_with(wait, zeros)
    return start


@breaks("reduced-once", BACKWARD, "where")
@breaks("reduced-once", BACKWARD, "where", limits=AS_FSDP2)
def gradients_swapped_in_a_message(step: StepGraph) -> fx.Node:
    """Two parameters of one shape change places in a packed message."""
    start = last_of(step, Role.REDUCE)
    packed = next(n for n in step.nodes(Role.GRADIENT) if n.target is aten.cat.default and _feeds(n, start))
    parts = list(packed.all_input_nodes)
    a, b = next(pair for pair in itertools.combinations(range(len(parts)), 2) if _alike(*(parts[i] for i in pair)))
    parts[a], parts[b] = parts[b], parts[a]
    packed.update_arg(0, parts)
    return start


def _alike(one: fx.Node, other: fx.Node) -> bool:
    return one.meta["val"].shape == other.meta["val"].shape


@breaks("reduced-once", BACKWARD, "where", limits=AS_FSDP2)
def parameters_swapped_in_what_was_reduced(step: StepGraph) -> fx.Node:
    """Two parameters of one shape take each other's part of the reduced message."""
    start = last_of(step, Role.REDUCE)
    (wait,) = start.users
    parts: dict[tuple[int, int], fx.Node] = {(n.args[2], n.args[3]): n for n in wait.users}  # type: ignore[misc]
    same = [n for (begin, end), n in sorted(parts.items()) if end - begin == min(e - b for b, e in parts)][:2]
    begins = [n.args[2:4] for n in same]
    for node, (begin, end) in zip(same, reversed(begins), strict=True):
        node.update_arg(2, begin)
        node.update_arg(3, end)
    return start


def _feeds(node: fx.Node, start: fx.Node) -> bool:
    return any(node in message.all_input_nodes for message in start.all_input_nodes)


@breaks("reduced-once", BACKWARD, "no flat parameter")
def gradients_of_two_units_swapped(step: StepGraph) -> fx.Node:
    """Each flat gradient is returned in the place of the other."""
    first, second = nodes_of(step, Role.FLAT_GRADIENT)[:2]
    swap: dict[object, fx.Node] = {first: second, second: first}
    step.output.args = ([swap.get(out, out) for out in returned_by(step)],)
    return first


def returned_by(step: StepGraph) -> list[Any]:
    outputs = step.output.args[0]
    assert isinstance(outputs, list | tuple)
    return list(outputs)


@breaks("reduced-once", BACKWARD, "went through", world=SQUARE, stage=Stage.INSERTED)
def replicas_left_out(step: StepGraph) -> fx.Node:
    """The flat gradient takes a reduced shard before it was averaged over the replicas."""
    wait = last_of(step, Role.REPLICATE_WAIT)
    replicate = input_of(wait)
    shard = input_of(replicate)
    wait.replace_all_uses_with(shard)
    step.graph.erase_node(wait)
    step.graph.erase_node(replicate)
    return input_of(shard)


@breaks("plan-order", FORWARD, "is waited for before it")
def gathers_swapped(step: StepGraph) -> fx.Node:
    first, second = nodes_of(step, Role.GATHER)[:2]
    for node in [*second.all_input_nodes, second]:
        first.prepend(node)
    return first


@breaks("plan-order", BACKWARD, "has its gradients before it")
def reductions_swapped(step: StepGraph) -> fx.Node:
    """The first reduction, with its waits, moves behind the start of the second."""
    first, second = nodes_of(step, Role.REDUCE)[:2]
    items = [u for u in first.users if u.target is getitem]
    waits = _messages(first)
    flat = next(iter(waits[0].users))
    anchor = _messages(second)[-1]
    for node in [flat, *reversed(waits), *reversed(items)]:
        anchor.append(node)
    second.append(first)
    return first
