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
from fsdp_compile.layout.spec import Reshard
from fsdp_compile.verify.limits import Limits
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
    """One way to break a graph.

    Attributes:
        rule: The rule that has to notice.
        edit: Breaks the graph and returns the node that the complaint has to name.
        phase: Which graph of the model is broken.
        says: A part of the complaint.
        model: Name in `MODELS`.
        world: Ranks and sharding.
        stage: How far the graph has come when it is broken.
        limits: What it is held to.
        prefetch: By which rule it was scheduled.
        bucket_mb: How large the units are that share collectives.
    """

    rule: str
    edit: Callable[[StepGraph], fx.Node]
    phase: Phase
    says: str
    model: str = "stack"
    world: World = PAIR
    stage: Stage = Stage.FINAL
    limits: Limits = NO_LIMITS
    prefetch: int | FSDPPrefetch = 1
    bucket_mb: float = 0

    @property
    def name(self) -> str:
        kept = "-kept-if-there-is-room" * (self.world is OPEN)
        return f"{self.rule}-{self.edit.__name__}{kept}"

    def graph(self) -> StepGraph:
        """The graph before it is broken."""
        layout = self.limits.reduce_layout
        return graph(
            self.phase,
            model=self.model,
            world=self.world,
            stage=self.stage,
            prefetch=self.prefetch,
            layout=layout,
            bucket_mb=self.bucket_mb,
        )


def _input(node: fx.Node, position: int = 0) -> fx.Node:
    source = node.args[position]
    assert isinstance(source, fx.Node)
    return source


def _all(step: StepGraph, role: Role) -> list[fx.Node]:
    return list(step.nodes(role))


def _last(step: StepGraph, role: Role) -> fx.Node:
    return _all(step, role)[-1]


def _users(node: fx.Node, role: Role) -> list[fx.Node]:
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    return sorted((u for u in node.users if role_of(u) is role), key=order.__getitem__)


def _copy(node: fx.Node, replaced: dict[fx.Node, fx.Node], after: fx.Node) -> fx.Node:
    """A second node like `node`, some of its inputs replaced."""
    with node.graph.inserting_after(after):
        return node.graph.node_copy(node, lambda n: replaced.get(n, n))


def _copy_collective(start: fx.Node, after: fx.Node) -> dict[fx.Node, fx.Node]:
    """A second collective like the grouped one at `start`, with items and waits, behind `after`."""
    replaced = {start: _copy(start, {}, after)}
    last = replaced[start]
    for item in [u for u in start.users if u.target is getitem]:
        last = replaced[item] = _copy(item, replaced, last)
        for wait in item.users:
            last = replaced[wait] = _copy(wait, replaced, last)
    return replaced


def _messages(start: fx.Node) -> list[fx.Node]:
    return [wait for item in start.users for wait in item.users]


# gather-waited


def wait_moved_after_its_use(step: StepGraph) -> fx.Node:
    wait = _last(step, Role.GATHER_WAIT)
    use = next(iter(wait.users))
    use.append(wait)
    return use


def unfinished_message_read(step: StepGraph) -> fx.Node:
    wait = _last(step, Role.GATHER_WAIT)
    use = _users(wait, Role.COPY_OUT)[0]
    use.replace_input_with(wait, _input(wait))
    return use


def message_never_waited_for(step: StepGraph) -> fx.Node:
    wait = _last(step, Role.REDUCE_WAIT)
    item = _input(wait)
    wait.replace_all_uses_with(item)
    step.graph.erase_node(wait)
    return _input(item)


def message_waited_for_twice(step: StepGraph) -> fx.Node:
    wait = _last(step, Role.REDUCE_WAIT)
    return _copy(wait, {}, wait)


# gathered-once


def unit_gathered_twice(step: StepGraph) -> fx.Node:
    start = _all(step, Role.GATHER)[-1]
    waits = _messages(start)
    replaced = _copy_collective(start, waits[-1])
    reshard = next(u for u in waits[0].users if role_of(u) is Role.RESHARD)
    _copy(reshard, replaced, reshard)
    reader = _users(waits[-1], Role.COPY_OUT)[-1]
    reader.replace_input_with(waits[-1], replaced[waits[-1]])
    return replaced[start]


def kept_parameter_gathered_again(step: StepGraph) -> fx.Node:
    """What is taken for another kept parameter is one that this graph gathers."""
    gather = _last(step, Role.GATHER)
    record = require(gather)
    saved = _last(step, Role.SAVED_PARAM)
    saved.meta[KEY] = dataclasses.replace(
        record, role=Role.SAVED_PARAM, parameters=record.parameters[:1], specs=record.specs[:1]
    )
    return gather


def copy_out_of_the_neighbour(step: StepGraph) -> fx.Node:
    """The slice out of a packed message starts at another parameter."""
    full = next(n for n in step.nodes(Role.FULL) if require(n).parameters[0].endswith("norm.bias"))
    part = full
    while part.target is not aten.slice.Tensor:
        part = _input(part)
    width = part.args[3] - part.args[2]  # type: ignore[operator]
    part.args = (*part.args[:2], part.args[2] - width, part.args[2], *part.args[4:])  # type: ignore[operator]
    return full


def gather_over_another_group(step: StepGraph) -> fx.Node:
    start = _all(step, Role.GATHER)[-1]
    start.update_arg(2, "fsdp.shard.7")
    return start


def parts_gathered_over_the_whole_group(step: StepGraph) -> fx.Node:
    start = _all(step, Role.GATHER)[-1]
    start.update_arg(2, "fsdp.shard.0")
    return start


def parts_swapped_in_backward(step: StepGraph) -> fx.Node:
    """The parts of two parameters of one shape change places in a grouped all-gather."""
    start = _all(step, Role.GATHER)[-1]
    parts = list(start.all_input_nodes)
    a, b = (next(i for i, n in enumerate(parts) if require(n).parameters[0].endswith(e)) for e in _NORM)
    parts[a], parts[b] = parts[b], parts[a]
    start.update_arg(0, parts)
    return next(n for n in step.nodes(Role.FULL) if require(n).parameters[0] == "blocks.0.norm.weight")


_NORM = ("norm.weight", "norm.bias")


# reduced-once


def gradient_reduced_twice(step: StepGraph) -> fx.Node:
    """A second reduce-scatter of the same messages, whose results are added to the first one's."""
    start = _last(step, Role.REDUCE)
    waits = _messages(start)
    replaced = _copy_collective(start, waits[-1])
    flat = next(iter(waits[0].users))
    with step.graph.inserting_before(flat):
        total = step.graph.call_function(aten.add.Tensor, (waits[0], replaced[waits[0]]))
    total.meta.update(waits[0].meta)
    total.meta[KEY] = dataclasses.replace(require(waits[0]), role=Role.SHARD_GRADIENT)
    flat.replace_input_with(waits[0], total)
    return replaced[start]


def gradient_summed_instead_of_averaged(step: StepGraph) -> fx.Node:
    start = _last(step, Role.REDUCE)
    start.update_arg(1, "sum")
    return start


def gradient_reduced_over_another_group(step: StepGraph) -> fx.Node:
    start = _last(step, Role.REDUCE)
    start.update_arg(3, "fsdp.replicate.0")
    return start


def reduced_gradient_dropped(step: StepGraph) -> fx.Node:
    """Zeros take the place of a reduced shard."""
    start = _last(step, Role.REDUCE)
    wait = _messages(start)[-1]
    flat = next(iter(wait.users))
    with step.graph.inserting_before(flat):
        zeros = step.graph.call_function(aten.new_zeros.default, (wait, [wait.meta["val"].numel()]))
    zeros.meta = {**wait.meta, KEY: dataclasses.replace(require(wait), role=Role.SHARD_GRADIENT)}
    flat.replace_input_with(wait, zeros)
    return start


def gradients_swapped_in_a_message(step: StepGraph) -> fx.Node:
    """Two parameters of one shape change places in a packed message."""
    start = _last(step, Role.REDUCE)
    packed = next(n for n in step.nodes(Role.GRADIENT) if n.target is aten.cat.default and _feeds(n, start))
    parts = list(packed.all_input_nodes)
    a, b = next(pair for pair in itertools.combinations(range(len(parts)), 2) if _alike(*(parts[i] for i in pair)))
    parts[a], parts[b] = parts[b], parts[a]
    packed.update_arg(0, parts)
    return start


def _alike(one: fx.Node, other: fx.Node) -> bool:
    return one.meta["val"].shape == other.meta["val"].shape


def gradients_swapped_in_fsdp2s_message(step: StepGraph) -> fx.Node:
    """Two parameters of one shape change places in a message without padding."""
    return gradients_swapped_in_a_message(step)


def parameters_swapped_in_what_was_reduced(step: StepGraph) -> fx.Node:
    """Two parameters of one shape take each other's part of the reduced message."""
    start = _last(step, Role.REDUCE)
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


def gradients_of_two_units_swapped(step: StepGraph) -> fx.Node:
    """Each flat gradient is returned in the place of the other."""
    first, second = _all(step, Role.FLAT_GRADIENT)[:2]
    swap: dict[object, fx.Node] = {first: second, second: first}
    step.output.args = ([swap.get(out, out) for out in _returned(step)],)
    return first


def _returned(step: StepGraph) -> list[Any]:
    outputs = step.output.args[0]
    assert isinstance(outputs, list | tuple)
    return list(outputs)


def replicas_left_out(step: StepGraph) -> fx.Node:
    """The flat gradient takes a reduced shard before it was averaged over the replicas."""
    wait = _last(step, Role.REPLICATE_WAIT)
    replicate = _input(wait)
    shard = _input(replicate)
    wait.replace_all_uses_with(shard)
    step.graph.erase_node(wait)
    step.graph.erase_node(replicate)
    return _input(shard)


# markers-gone


def marker_left(step: StepGraph) -> fx.Node:
    flat = _last(step, Role.FLAT)
    with step.graph.inserting_before(step.output):
        return step.graph.call_function(torch.ops.fsdp_compile.unshard.default, (flat, require(flat).specs[0].text))


# no-use-after-reshard


def reshard_deleted(step: StepGraph) -> fx.Node:
    step.graph.erase_node(_last(step, Role.RESHARD))
    return _last(step, Role.GATHER)


def reshard_before_the_last_use(step: StepGraph) -> fx.Node:
    marker = _last(step, Role.RESHARD)
    marker.all_input_nodes[-1].append(marker)
    return _users(marker.all_input_nodes[-1], Role.COPY_OUT)[0]


def reshard_twice(step: StepGraph) -> fx.Node:
    marker = _last(step, Role.RESHARD)
    return _copy(marker, {}, marker)


def reshard_of_some_messages(step: StepGraph) -> fx.Node:
    marker = _last(step, Role.RESHARD)
    marker.args = (marker.all_input_nodes[:-1],)
    return marker


# nothing-unsharded-saved


def _save(step: StepGraph, node: fx.Node) -> None:
    step.output.args = ([*_returned(step), node],)
    step.output.meta["desc"] = [*step.output.meta["desc"], step.output.meta["desc"][-1]]


def copied_parameter_saved(step: StepGraph) -> fx.Node:
    full = next(n for n in step.nodes(Role.FULL) if require(n).parameters[0].endswith("norm.bias"))
    _save(step, full)
    return full


def transposed_parameter_saved(step: StepGraph) -> fx.Node:
    """As the default partitioner does; the bucket then cannot be resharded."""
    marker = _last(step, Role.RESHARD)
    message = marker.all_input_nodes[-1]
    step.graph.erase_node(marker)
    full = next(n for n in step.nodes(Role.FULL) if _input(_input(n)) is message)
    transposed = next(iter(full.users))
    _save(step, transposed)
    return transposed


def parameter_taken_that_was_to_be_freed(step: StepGraph) -> fx.Node:
    saved = _last(step, Role.SAVED_PARAM)
    (spec,) = require(saved).specs
    freed = dataclasses.replace(spec, reshard=Reshard.AFTER_FORWARD)
    saved.meta[KEY] = dataclasses.replace(require(saved), specs=(freed,))
    return saved


def part_of_the_neighbour_kept(step: StepGraph) -> fx.Node:
    """What is cut out of a packed part starts at another parameter."""
    cut = next(n for n in step.nodes(Role.POST_FORWARD_SHARD) if n.target is aten.slice.Tensor)
    cut.args = (*cut.args[:2], cut.args[2] + 64, cut.args[3] + 64)  # type: ignore[operator]
    kept = cut
    while kept not in _returned(step):
        kept = next(iter(kept.users))
    return kept


def gathered_memory_returned_by_backward(step: StepGraph) -> fx.Node:
    marker = _last(step, Role.RESHARD)
    message = marker.all_input_nodes[-1]
    step.graph.erase_node(marker)
    step.output.args = ([*_returned(step), message],)
    return message


# unsharded-bytes


def gather_started_too_early(step: StepGraph) -> fx.Node:
    """The third bucket starts at the top, beside the first two."""
    starts = _all(step, Role.GATHER)
    for node in [*starts[2].all_input_nodes, starts[2]]:
        next(n for n in step.graph.nodes if role_of(n) is Role.GATHER_WAIT).prepend(node)
    return starts[2]


def gather_beside_another(step: StepGraph) -> fx.Node:
    """The second bucket starts before the first one is freed."""
    gather = _all(step, Role.GATHER)[1]
    for node in [*gather.all_input_nodes, gather]:
        _all(step, Role.RESHARD)[0].prepend(node)
    return gather


def told_to_prefetch_and_gathered_elsewhere(step: StepGraph) -> fx.Node:
    """The list says the first bucket; the gather starts at the second one."""
    starts = _all(step, Role.GATHER)
    last, first = require(starts[2]).unit, require(starts[0]).unit
    flat = next(node for node in _all(step, Role.FLAT) if require(node).unit == first)
    record = require(flat)
    specs = tuple(dataclasses.replace(spec, forward_prefetch=(last,)) for spec in record.specs)
    for node in step.graph.nodes:
        if role_of(node) is not None and require(node).unit == first:
            own = dict(zip(record.specs, specs, strict=True))
            node.meta[KEY] = dataclasses.replace(require(node), specs=tuple(own[s] for s in require(node).specs))
    return starts[2]


def bucket_beyond_the_budget(step: StepGraph) -> fx.Node:
    return _all(step, Role.GATHER)[1]


def kept_beyond_the_budget(step: StepGraph) -> fx.Node:
    return _all(step, Role.GATHER)[0]


def reshard_at_the_end(step: StepGraph) -> fx.Node:
    marker = _all(step, Role.RESHARD)[0]
    step.output.prepend(marker)
    return marker


# plan-order


def gathers_swapped(step: StepGraph) -> fx.Node:
    first, second = _all(step, Role.GATHER)[:2]
    for node in [*second.all_input_nodes, second]:
        first.prepend(node)
    return first


def reductions_swapped(step: StepGraph) -> fx.Node:
    """The first reduction, with its waits, moves behind the start of the second."""
    first, second = _all(step, Role.REDUCE)[:2]
    items = [u for u in first.users if u.target is getitem]
    waits = _messages(first)
    flat = next(iter(waits[0].users))
    anchor = _messages(second)[-1]
    for node in [flat, *reversed(waits), *reversed(items)]:
        anchor.append(node)
    second.append(first)
    return first


# nothing-rank-specific


def group_named_after_its_ranks(step: StepGraph) -> fx.Node:
    """Torch's own name of the group, which differs between the shard groups of a 2-D mesh."""
    for node in _all(step, Role.REDUCE):
        node.update_arg(3, "0")
    return _last(step, Role.REDUCE)


def slice_at_the_rank(step: StepGraph) -> fx.Node:
    part = _last(step, Role.SHARD)
    part.args = (*part.args[:2], part.args[2] + 1, part.args[3] + 1)  # type: ignore[operator]
    return part


def device_of_this_rank(step: StepGraph) -> fx.Node:
    full = _last(step, Role.FULL)
    full.kwargs = {"device": torch.device("cuda", 3)}
    return full


def constant_of_this_process(step: StepGraph) -> fx.Node:
    flat = _last(step, Role.FLAT_GRADIENT)
    step.gm.register_buffer("padding", torch.zeros(32))
    with step.graph.inserting_before(flat):
        padding = step.graph.get_attr("padding")
    padding.meta["val"] = flat.all_input_nodes[0].meta["val"]
    flat.args = ([*flat.all_input_nodes, padding],)
    return flat


# buffers-aligned


def _change_slot(step: StepGraph, name: str, *, offset: int = 0, extent: int = 0) -> fx.Node:
    """Moves or stretches a slot that nobody reads in this graph."""
    flat = next(n for n in step.nodes(Role.FLAT) if name in require(n).parameters)
    record = require(flat)
    specs = list(record.specs)
    place = record.parameters.index(name)
    spec = specs[place]
    specs[place] = dataclasses.replace(spec, offset=spec.offset + offset, extent=spec.extent + extent)
    flat.meta[KEY] = dataclasses.replace(record, specs=tuple(specs))
    return flat


def slots_overlap(step: StepGraph) -> fx.Node:
    return _change_slot(step, "unused.bias", extent=64)


def slot_off_the_grid(step: StepGraph) -> fx.Node:
    return _change_slot(step, "unused.weight", extent=-1)


def slot_smaller_than_its_shard(step: StepGraph) -> fx.Node:
    return _change_slot(step, "unused.weight", extent=-32)


def slot_beyond_the_end(step: StepGraph) -> fx.Node:
    flat = next(n for n in step.nodes(Role.FLAT) if "unused.weight" in require(n).parameters)
    return _change_slot(step, "unused.weight", offset=flat.meta["val"].numel())


# typed


def phase_of_the_other_graph(step: StepGraph) -> fx.Node:
    wait = _last(step, Role.GATHER_WAIT)
    wait.meta[KEY] = dataclasses.replace(require(wait), phase=Phase.FORWARD)
    return wait


def record_forgotten(step: StepGraph) -> fx.Node:
    wait = _last(step, Role.GATHER_WAIT)
    del wait.meta[KEY]
    return wait


def scales_of_another_parameter(step: StepGraph) -> fx.Node:
    first, second = _dequantized(step)[:2]
    first.replace_input_with(_input(first, 1), _input(second, 1))
    return _reader(first)


def numbers_of_another_dtype(step: StepGraph) -> fx.Node:
    node = _dequantized(step)[0]
    node.update_arg(2, "float8_e4m3fn")
    return _reader(node)


def _dequantized(step: StepGraph) -> list[fx.Node]:
    return [node for node in _all(step, Role.COPY_OUT) if node.target is torch.ops.fsdp_compile.dequantize.default]


def _reader(node: fx.Node) -> fx.Node:
    while role_of(node) is not Role.FULL:
        node = next(iter(node.users))
    return node


def gradient_copied_to_where_it_is(step: StepGraph) -> fx.Node:
    joined = _last(step, Role.FLAT_GRADIENT)
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


def collective_without_a_record(step: StepGraph) -> fx.Node:
    start = _last(step, Role.REDUCE)
    del start.meta[KEY]
    return start


def view_recorded_as_a_gather(step: StepGraph) -> fx.Node:
    part = _last(step, Role.COPY_OUT)
    part.meta[KEY] = dataclasses.replace(require(part), role=Role.GATHER)
    return part


def record_of_nothing(step: StepGraph) -> fx.Node:
    part = _last(step, Role.COPY_OUT)
    part.meta[KEY] = dataclasses.replace(require(part), parameters=(), specs=())
    return part


BREAKS = (
    Break("gather-waited", wait_moved_after_its_use, FORWARD, "stands before"),
    Break("gather-waited", unfinished_message_read, FORWARD, "may still be running"),
    Break("gather-waited", message_never_waited_for, BACKWARD, "nobody waits"),
    Break("gather-waited", message_waited_for_twice, BACKWARD, "waits for the same"),
    Break("gathered-once", unit_gathered_twice, FORWARD, "gathers already"),
    Break("gathered-once", copy_out_of_the_neighbour, FORWARD, "element 0 is"),
    Break("gathered-once", gather_over_another_group, FORWARD, "'fsdp.shard.7'"),
    Break("gathered-once", scales_of_another_parameter, FORWARD, "has the scale of", world=QUANTIZED),
    Break("gathered-once", numbers_of_another_dtype, FORWARD, "is read as", world=QUANTIZED),
    Break("gathered-once", scales_of_another_parameter, FORWARD, "has the scale of", world=FOUR_BITS),
    Break("gathered-once", numbers_of_another_dtype, FORWARD, "is read as", world=FOUR_BITS),
    Break("gathered-once", parts_gathered_over_the_whole_group, BACKWARD, "'fsdp.shard.0'", world=KEPT),
    Break("gathered-once", parts_swapped_in_backward, BACKWARD, "another parameter", world=KEPT),
    Break("gathered-once", kept_parameter_gathered_again, BACKWARD, "holds already", world=OPEN),
    Break("reduced-once", gradient_reduced_twice, BACKWARD, "reduces already"),
    Break("reduced-once", gradient_summed_instead_of_averaged, BACKWARD, "combined by 'sum'"),
    Break("reduced-once", gradient_reduced_over_another_group, BACKWARD, "'fsdp.replicate.0'"),
    Break("reduced-once", reduced_gradient_dropped, BACKWARD, "reaches no output"),
    Break("reduced-once", gradients_swapped_in_a_message, BACKWARD, "where"),
    Break("reduced-once", gradients_swapped_in_fsdp2s_message, BACKWARD, "where", limits=AS_FSDP2),
    Break("reduced-once", parameters_swapped_in_what_was_reduced, BACKWARD, "where", limits=AS_FSDP2),
    Break("reduced-once", gradients_of_two_units_swapped, BACKWARD, "no flat parameter"),
    Break("reduced-once", replicas_left_out, BACKWARD, "went through", world=SQUARE, stage=Stage.INSERTED),
    Break("host-copies", gradient_copied_to_where_it_is, BACKWARD, "is copied to the host"),
    Break("markers-gone", marker_left, FORWARD, "marker"),
    Break("no-use-after-reshard", reshard_deleted, BACKWARD, "never resharded"),
    Break("no-use-after-reshard", reshard_before_the_last_use, FORWARD, "freed it"),
    Break("no-use-after-reshard", reshard_twice, FORWARD, "already"),
    Break("no-use-after-reshard", reshard_of_some_messages, FORWARD, "unsharded"),
    Break("nothing-unsharded-saved", copied_parameter_saved, FORWARD, "256 bytes"),
    Break("nothing-unsharded-saved", transposed_parameter_saved, FORWARD, "weight alone"),
    Break("nothing-unsharded-saved", transposed_parameter_saved, FORWARD, "weight alone", world=OPEN),
    Break("nothing-unsharded-saved", parameter_taken_that_was_to_be_freed, BACKWARD, "forward kept", world=OPEN),
    Break("nothing-unsharded-saved", part_of_the_neighbour_kept, FORWARD, "keeps 512 bytes", world=KEPT),
    Break("nothing-unsharded-saved", gathered_memory_returned_by_backward, BACKWARD, "leaves the backward graph"),
    Break("unsharded-bytes", gather_started_too_early, FORWARD, "2 others", limits=Limits(prefetch=1)),
    Break(
        "unsharded-bytes",
        gather_beside_another,
        BACKWARD,
        "is held",
        limits=ALONE,
        prefetch=POST,
    ),
    Break("unsharded-bytes", bucket_beyond_the_budget, FORWARD, "bytes", limits=Limits(unsharded_bytes=200_000)),
    Break(
        "unsharded-bytes", kept_beyond_the_budget, BACKWARD, "bytes", world=OPEN, limits=Limits(unsharded_bytes=100_000)
    ),
    Break("unsharded-bytes", reshard_at_the_end, FORWARD, "which needs none", limits=Limits(prefetch=1)),
    Break("explicit-prefetch", told_to_prefetch_and_gathered_elsewhere, FORWARD, "told to prefetch, after %"),
    Break("plan-order", gathers_swapped, FORWARD, "is waited for before it"),
    Break("plan-order", reductions_swapped, BACKWARD, "has its gradients before it"),
    Break("nothing-rank-specific", group_named_after_its_ranks, BACKWARD, "'0'"),
    Break("nothing-rank-specific", slice_at_the_rank, FORWARD, "of the flat parameter"),
    Break("nothing-rank-specific", device_of_this_rank, FORWARD, "cuda:3"),
    Break("nothing-rank-specific", constant_of_this_process, BACKWARD, "constant"),
    Break("buffers-aligned", slots_overlap, FORWARD, "inside of", model="partial"),
    Break("buffers-aligned", slot_off_the_grid, FORWARD, "not aligned", model="partial"),
    Break("buffers-aligned", slot_smaller_than_its_shard, FORWARD, "for a shard of", model="partial"),
    Break("buffers-aligned", slot_beyond_the_end, FORWARD, "beyond", model="partial"),
    Break("typed", phase_of_the_other_graph, BACKWARD, "forward in the backward graph"),
    Break("typed", record_forgotten, BACKWARD, "carries no record"),
    Break("typed", collective_without_a_record, BACKWARD, "carries no record"),
    Break("typed", view_recorded_as_a_gather, FORWARD, "recorded as gather"),
    Break("typed", record_of_nothing, FORWARD, "0 parameters"),
)
