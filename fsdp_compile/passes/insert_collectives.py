"""Replaces the markers by collectives, one parameter at a time.

    %w = fsdp_compile.unshard(%flat, spec)             ->  slice, all_gather, wait, view
    %g = fsdp_compile.reduce_grad(%flat, %grad, spec)  ->  pad, reduce_scatter, wait, place in the flat gradient
    %g = fsdp_compile.reduce_rows(%flat, %grad, ...)   ->  average_rows, place in the flat gradient

1. Reads are moved down to their first use, so that a gather knows when it is needed.
2. A parameter that is read twice is gathered once. In a world of one rank nothing is gathered: a read is a view of the
   flat parameter. A parameter with a post-forward shard (`ops/post_forward.py`) is gathered from the flat parameters in
   forward, where the shard is copied out of the message, and from these shards in backward.
3. A table that is looked up on the ranks that have its rows (`capture/shard_embeddings.py`) is not gathered.
4. The gradients of a parameter are summed before they are reduced once, in autograd's order. They are joined in one
   gradient per flat parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.ir.edit import GraphBuilder, sink
from fsdp_compile.ir.graph import Role, Stage, StepGraph, require
from fsdp_compile.ir.queries import (
    GRADIENTS_OF_READS,
    READS,
    added_gradients,
    last_of,
    parameter_only,
    read_text,
    unsharded_value,
)
from fsdp_compile.layout.messages import cast, gradient_rows, narrow, view
from fsdp_compile.layout.spec import GradPlacement, UnshardSpec, parse, scaling
from fsdp_compile.ops.embedding import AVERAGE_ROWS, LOOK_UP, REDUCE_ROWS
from fsdp_compile.ops.post_forward import SHARD_POST_FORWARD
from fsdp_compile.passes.emit import add_partial, copy_out, full_node, message_of, reduce_one, shard_post_forward

aten = torch.ops.aten
_ROLE_OF_PLACEMENT = {
    GradPlacement.REDUCED: Role.FLAT_GRADIENT,
    GradPlacement.REDUCE_SCATTERED: Role.PARTIAL_GRADIENT,
    GradPlacement.UNREDUCED: Role.UNREDUCED_GRADIENT,
}


@dataclasses.dataclass(frozen=True)
class Read:
    """Markers that read one parameter, in graph order; it is gathered at the first one."""

    markers: tuple[fx.Node, ...]
    spec: UnshardSpec


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Markers of one parameter's gradients in the order in which autograd adds them, and the last in the graph."""

    markers: tuple[fx.Node, ...]
    last_marker: fx.Node
    spec: UnshardSpec


@dataclasses.dataclass(frozen=True)
class FlatGradient:
    """One output of the backward graph: the gradient of `flat`, made of `reductions` in the order of their offsets."""

    output: fx.Node
    flat: fx.Node
    reductions: tuple[Reduction, ...]


@dataclasses.dataclass(frozen=True)
class InsertPlan:
    """All reads and all flat gradients of a graph."""

    reads: tuple[Read, ...]
    flat_gradients: tuple[FlatGradient, ...]


class InsertCollectives:
    """The pass; see the module's docstring."""

    name = "insert-collectives"
    requires, ensures = None, Stage.INSERTED

    def plan(self, step: StepGraph) -> InsertPlan:
        """Groups the markers by parameter."""
        order = step.order()
        reads: dict[tuple[fx.Node, str], list[fx.Node]] = {}
        for node in step.graph.nodes:
            if node.target in READS and node.args[0].target is not SHARD_POST_FORWARD:
                reads.setdefault((node.args[0], read_text(node)), []).append(node)
        sums = _gradient_sums(step)
        return InsertPlan(
            tuple(Read(tuple(markers), parse(text)) for (_, text), markers in reads.items()),
            tuple(_plan_flat_gradient(n, sums[n], order) for n in step.output.all_input_nodes if n in sums),
        )

    def apply(self, step: StepGraph, plan: InsertPlan) -> None:
        """Writes the collectives and erases the markers."""
        sink(step.graph, parameter_only(step.graph))
        order = step.order()  # of the existing nodes, which inserting others does not change
        for read in plan.reads:
            _insert_gather(step, read, order)
        for node in step.graph.find_nodes(op="call_function", target=LOOK_UP):
            node.meta["fsdp"] = require(node.args[0]).of_one(parse(read_text(node)), Role.LOOK_UP, step.phase)
        for flat_gradient in plan.flat_gradients:
            _insert_reductions(step, flat_gradient, order)


def _insert_gather(step: StepGraph, read: Read, order: dict[fx.Node, int]) -> None:
    spec = read.spec
    marker = min(read.markers, key=order.__getitem__)
    flat = marker.args[0]
    assert isinstance(flat, fx.Node)
    b = GraphBuilder(step.graph, require(flat).of_one(spec, Role.SHARD, step.phase), marker)
    kept = unsharded_value(marker)
    with step.graph.inserting_before(marker):
        if kept is None:
            message = message_of(b, marker, spec)
            full = full_node(b, message, spec, start=0, span=spec.extent)
        else:
            with b.as_role(Role.FULL):  # it is still unsharded since an earlier call
                full = message = b.call(aten.view.default, kept, list(spec.shape))
    for node in read.markers:
        for part in [user for user in node.users if user.target is SHARD_POST_FORWARD]:
            shard_post_forward(b, part, message, full)
        node.replace_all_uses_with(full)
        step.graph.erase_node(node)


def _gradient_sums(step: StepGraph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Markers, and sums of nothing but markers, each with its markers from left to right."""
    sums: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in step.graph.nodes:
        if node.target in GRADIENTS_OF_READS:
            sums[node] = (node,)
        elif node.target is aten.add.Tensor and all(side in sums for side in node.args[:2]):
            left, right = node.args[:2]
            # The order of autograd's additions, which `_insert_reduction` repeats: sums of floats depend on it.
            sums[node] = sums[left] + sums[right]
    return sums


def _plan_flat_gradient(output: fx.Node, markers: Sequence[fx.Node], order: dict[fx.Node, int]) -> FlatGradient:
    flats = {m.args[0] for m in markers}
    if len(flats) != 1:
        raise UnsupportedModelError("the gradients of two flat parameters are added to one another", where=str(output))
    by_spec: dict[str, list[fx.Node]] = {}
    for marker in markers:
        by_spec.setdefault(read_text(marker), []).append(marker)
    reductions = [Reduction(tuple(same), last_of(same, order), parse(text)) for text, same in by_spec.items()]
    return FlatGradient(output, flats.pop(), tuple(sorted(reductions, key=lambda r: r.spec.offset)))  # type: ignore[arg-type]


def _insert_reductions(step: StepGraph, planned: FlatGradient, order: dict[fx.Node, int]) -> None:
    pieces = []
    for reduction in planned.reductions:
        marker = reduction.last_marker
        stays = marker.target is REDUCE_ROWS
        role = Role.AVERAGE_ROWS if stays else Role.GRADIENT
        record = require(planned.flat).of_one(reduction.spec, role, step.phase)
        b = GraphBuilder(step.graph, record, marker)
        with step.graph.inserting_before(marker):
            piece = _insert_average(b, reduction) if stays else _insert_reduction(b, reduction)
        pieces.append((reduction.spec.offset, piece))
    placement = planned.reductions[0].spec.grad_placement
    flat_record = dataclasses.replace(require(planned.flat), role=Role.SHARD_GRADIENT, phase=step.phase)
    # Where all pieces exist: at the sum that the flat gradient replaces, or at the last marker.
    with step.graph.inserting_before(last_of([planned.output, *(r.last_marker for r in planned.reductions)], order)):
        b = GraphBuilder(step.graph, flat_record, planned.output)
        # Unreduced, a gradient has a part for each rank that has rows in it.
        parts = planned.reductions[0].spec.size if placement is GradPlacement.UNREDUCED else 1
        flat_gradient = join_pieces(b, planned.output, pieces, parts=parts)
    flat_gradient.meta["fsdp"] = dataclasses.replace(flat_record, role=_ROLE_OF_PLACEMENT[placement])
    planned.output.replace_all_uses_with(flat_gradient)
    _erase_sums(planned.output)


def _insert_reduction(b: GraphBuilder, reduction: Reduction) -> fx.Node:
    """Records one parameter's reduction; the result is `[extent]`, or `[size, extent]` if it stays unreduced."""
    spec = reduction.spec
    # Read now, not when planned: a gradient may itself be a parameter whose read has been replaced since.
    gradient, *others = [marker.args[1] for marker in reduction.markers]
    assert isinstance(gradient, fx.Node)
    for other in others:
        gradient = b.call(aten.add.Tensor, gradient, other)
    rows = gradient_rows(b, gradient, spec)
    if spec.grad_placement is GradPlacement.UNREDUCED:
        return cast(b, rows, spec.unrounded_dtype)
    held, partial = added_gradients(reduction.last_marker)
    if held is not None:
        rows = cast(b, rows, spec.unrounded_dtype)
        with b.as_role(Role.ADD_UNREDUCED):
            every = view(b, held, [spec.size, b.value(held).shape[0] // spec.size])
            rows = b.call(aten.add.Tensor, narrow(b, every, 1, spec.offset, spec.offset + spec.extent), rows)
    rows = cast(b, rows, spec.reduce_dtype)
    message = view(b, rows, [spec.size * spec.extent])
    if (factor := scaling(spec).before) is not None:
        message = b.call(aten.div.Tensor, message, factor)
    return reduce_one(b, message, spec, lambda shard: add_partial(b, partial, spec.offset, shard))


def _insert_average(b: GraphBuilder, reduction: Reduction) -> fx.Node:
    """Records the average of a looked-up parameter's gradients, `[extent]` in the dtype of reductions."""
    first, *others = reduction.markers
    _, gradient, ids, *settings = first.args
    if others:
        width = reduction.spec.shape[1]
        gradient = _joined_rows(b, [marker.args[1] for marker in reduction.markers], [-1, width])
        ids = _joined_rows(b, [marker.args[2] for marker in reduction.markers], [-1])
    return b.call(AVERAGE_ROWS, gradient, ids, *settings)


def _joined_rows(b: GraphBuilder, parts: Sequence[Any], shape: list[int]) -> fx.Node:
    with b.as_role(Role.GRADIENT):
        return b.call(aten.cat.default, [b.call(aten.reshape.default, part, shape) for part in parts])


def join_pieces(b: GraphBuilder, like: fx.Node, pieces: Iterable[tuple[int, fx.Node]], *, parts: int = 1) -> fx.Node:
    """Records a flat parameter's gradient: pieces at their offsets, zeros elsewhere.

    `like` has the size, dtype and device of the gradient, which is `parts` times the flat parameter. A piece is its
    offset there, and `[n]` elements from there on; or `[parts, n]`.
    """
    value = b.value(like)
    ordered = sorted(pieces, key=lambda item: item[0])
    ends = [*(offset for offset, _ in ordered[1:]), value.shape[0] // parts]
    padded = []
    begin = 0
    for (offset, piece), end in zip(ordered, ends, strict=True):
        part = cast(b, piece, value.dtype)
        before, after = offset - begin, end - offset - b.value(piece).shape[-1]
        # Padding, not `zeros`, whose device argument would have this rank's index and differ between ranks.
        padded.append(b.call(aten.constant_pad_nd.default, part, [before, after]) if before or after else part)
        begin = end
    alone = len(padded) == 1 and require(padded[0]).role is not Role.GRADIENT  # a message without other users
    if alone and (copied := copy_out(b, padded[0])) is not padded[0]:
        return copied
    if alone:
        return b.call(aten.view.default, padded[0], list(value.shape))
    if b.value(padded[0]).dim() == 1:
        return copy_out(b, b.call(aten.cat.default, padded))
    return b.call(aten.view.default, b.call(aten.cat.default, padded, 1), list(value.shape))


def _erase_sums(output: fx.Node) -> None:
    todo = [output]
    while todo:
        node = todo.pop()
        if node.users:
            continue
        summed = (*GRADIENTS_OF_READS, aten.add.Tensor)
        todo.extend(s for s in node.all_input_nodes if s.target in summed and "fsdp" not in s.meta)
        node.graph.erase_node(node)
