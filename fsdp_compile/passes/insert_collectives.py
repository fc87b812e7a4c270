"""Replaces the markers by collectives, one parameter at a time.

    %w = fsdp.unshard(%flat, spec)             ->  slice, all_gather, wait, view
    %g = fsdp.reduce_grad(%flat, %grad, spec)  ->  pad, reduce_scatter, wait, place in the flat gradient

A parameter that is read twice is gathered once, and its gradients are summed before they are reduced once. Reads are
moved down to their first use, so that a gather knows when it is needed. In a world of one rank nothing is gathered:
a read is a view of the flat shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import fx

from fsdp_compile._torch import collectives
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.ir.edit import GraphBuilder, erase_unused
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.queries import REDUCE_GRAD, UNSHARD, last_of, parameter_only
from fsdp_compile.ir.record import Record, Role, require
from fsdp_compile.parameters import assemble
from fsdp_compile.parameters.spec import ReadSpec, parse

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Read:
    """Markers that read one parameter, in graph order; the first one's place is where it is gathered."""

    markers: tuple[fx.Node, ...]
    spec: ReadSpec


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Gradients of one parameter, in the order in which autograd would add them, and the last marker among them."""

    gradients: tuple[fx.Node, ...]
    last_marker: fx.Node
    spec: ReadSpec


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

    def plan(self, step: StepGraph) -> InsertPlan:
        """Groups the markers by parameter."""
        order = step.order()
        reads: dict[tuple[fx.Node, str], list[fx.Node]] = {}
        for node in step.graph.find_nodes(op="call_function", target=UNSHARD):
            reads.setdefault(node.args, []).append(node)
        outputs = [n for n in step.output.all_input_nodes if n.target is REDUCE_GRAD or _is_gradient_sum(n)]
        return InsertPlan(
            tuple(Read(tuple(markers), parse(text)) for (_, text), markers in reads.items()),
            tuple(_plan_flat_gradient(node, order) for node in outputs),
        )

    def apply(self, step: StepGraph, plan: InsertPlan) -> None:
        """Writes the collectives and erases the markers."""
        _sink(step, parameter_only(step.graph))
        for read in plan.reads:
            _insert_gather(step, read)
        for flat_gradient in plan.flat_gradients:
            _insert_reductions(step, flat_gradient)


def _sink(step: StepGraph, nodes: Iterable[fx.Node]) -> None:
    """Moves each node right before its first user, users of users first."""
    order = step.order()
    for node in reversed(list(nodes)):
        if node.users:
            first = min(node.users, key=order.__getitem__)
            first.prepend(node)
            order[node] = order[first]


def _parameter_record(flat: fx.Node, spec: ReadSpec, role: Role, step: StepGraph) -> Record:
    record = require(flat)
    name = record.parameters[record.specs.index(spec)]
    return Record(role, record.unit, (name,), (spec,), step.phase)


def _insert_gather(step: StepGraph, read: Read) -> None:
    spec = read.spec
    order = step.order()
    marker = min(read.markers, key=order.__getitem__)
    flat = marker.args[0]
    assert isinstance(flat, fx.Node)
    b = GraphBuilder(step.graph, _parameter_record(flat, spec, Role.SHARD, step), marker)
    with step.graph.inserting_before(marker):
        message = assemble.narrow(b, flat, 0, spec.offset, spec.offset + spec.extent)
        message = assemble.cast(b, message, spec.param_dtype)
        if spec.size > 1:
            with b.as_role(Role.GATHER):
                message = b.call(collectives.all_gather_into_tensor.default, message, spec.size, spec.group)
            with b.as_role(Role.GATHER_WAIT):
                message = b.call(collectives.wait_tensor.default, message)
        full = full_node(b, message, spec, start=0, span=spec.extent)
    for node in read.markers:
        node.replace_all_uses_with(full)
        step.graph.erase_node(node)


def full_node(b: GraphBuilder, message: fx.Node, spec: ReadSpec, *, start: int, span: int) -> fx.Node:
    """Records the steps from a gathered message to a full parameter; the last one has role FULL."""
    with b.as_role(Role.COPY_OUT):
        full = assemble.full_parameter(b, message, spec, start=start, span=span)
        if full is message:  # a node of its own, so that readers and the wait are told apart
            full = b.call(aten.view.default, message, list(spec.shape))
    full.meta["fsdp"] = dataclasses.replace(b.record, role=Role.FULL)
    return full


def _is_gradient_sum(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and all(
        isinstance(a, fx.Node) and (a.target is REDUCE_GRAD or _is_gradient_sum(a)) for a in node.args[:2]
    )


def _leaves(node: fx.Node) -> list[fx.Node]:
    if node.target is REDUCE_GRAD:
        return [node]
    return [leaf for side in node.args[:2] for leaf in _leaves(side)]  # type: ignore[arg-type]


def _plan_flat_gradient(output: fx.Node, order: dict[fx.Node, int]) -> FlatGradient:
    markers = _leaves(output)
    flats = {m.args[0] for m in markers}
    if len(flats) != 1:
        raise UnsupportedModelError("the gradients of two flat shards are added to one another", where=str(output))
    by_spec: dict[str, list[fx.Node]] = {}
    for marker in markers:
        by_spec.setdefault(marker.args[2], []).append(marker)  # type: ignore[arg-type]
    reductions = [
        Reduction(tuple(m.args[1] for m in same), last_of(same, order), parse(text))  # type: ignore[misc]
        for text, same in by_spec.items()
    ]
    return FlatGradient(output, flats.pop(), tuple(sorted(reductions, key=lambda r: r.spec.offset)))  # type: ignore[arg-type]


def _insert_reductions(step: StepGraph, planned: FlatGradient) -> None:
    pieces = []
    for reduction in planned.reductions:
        marker = reduction.last_marker
        record = _parameter_record(planned.flat, reduction.spec, Role.GRADIENT, step)
        b = GraphBuilder(step.graph, record, marker)
        with step.graph.inserting_before(marker):
            pieces.append((reduction.spec.offset, _insert_reduction(b, reduction)))
    flat_record = dataclasses.replace(require(planned.flat), role=Role.SHARD_GRADIENT, phase=step.phase)
    with step.graph.inserting_before(_after_pieces(step, planned)):
        b = GraphBuilder(step.graph, flat_record, planned.output)
        flat_gradient = join_pieces(b, planned.flat, pieces)
    flat_gradient.meta["fsdp"] = dataclasses.replace(flat_record, role=Role.FLAT_GRADIENT)
    planned.output.replace_all_uses_with(flat_gradient)
    _erase_sums(planned.output)


def _after_pieces(step: StepGraph, planned: FlatGradient) -> fx.Node:
    """The node before which all pieces exist: the sum that the flat gradient replaces, or the last marker."""
    return last_of([planned.output, *(r.last_marker for r in planned.reductions)], step.order())


def _insert_reduction(b: GraphBuilder, reduction: Reduction) -> fx.Node:
    """Records one parameter's reduction; the result is `[extent]` in the flat shard's dtype."""
    spec = reduction.spec
    gradient = reduction.gradients[0]
    for other in reduction.gradients[1:]:
        gradient = b.call(aten.add.Tensor, gradient, other)
    rows = assemble.cast(b, assemble.gradient_rows(b, gradient, spec), spec.reduce_dtype)
    message = assemble.view(b, rows, [spec.size * spec.extent])
    if spec.size > 1:
        with b.as_role(Role.REDUCE):
            op = collectives.reduce_scatter_tensor.default
            message = b.call(op, message, "avg", spec.size, spec.group)
        with b.as_role(Role.REDUCE_WAIT):
            message = b.call(collectives.wait_tensor.default, message)
    return average_over_replicas(b, message, spec)


def average_over_replicas(b: GraphBuilder, shard: fx.Node, spec: ReadSpec) -> fx.Node:
    """Records the all-reduce of a reduced shard over the replicate group, if there is one (hybrid sharding)."""
    if spec.replicas == 1:
        return shard
    with b.as_role(Role.REPLICATE):
        shard = b.call(collectives.all_reduce.default, shard, "avg", spec.replicate_group)
    with b.as_role(Role.REPLICATE_WAIT):
        return b.call(collectives.wait_tensor.default, shard)


def join_pieces(b: GraphBuilder, flat: fx.Node, pieces: Iterable[tuple[int, fx.Node]]) -> fx.Node:
    """Records the flat gradient: pieces at their offsets, zeros where nothing arrived, in the flat shard's dtype."""
    value = b.value(flat)
    parts: list[fx.Node] = []
    end = 0

    def zeros_until(offset: int) -> None:
        if offset > end:
            parts.append(b.call(aten.full.default, [offset - end], 0, dtype=value.dtype, device=value.device))

    for offset, piece in sorted(pieces, key=lambda item: item[0]):
        zeros_until(offset)
        parts.append(assemble.cast(b, piece, value.dtype))
        end = offset + b.value(piece).shape[0]
    zeros_until(value.shape[0])
    return b.call(aten.cat.default, parts)


def _erase_sums(node: fx.Node) -> None:
    sources = node.all_input_nodes
    erase_unused([node])
    for source in sources:
        if source.target is REDUCE_GRAD or _is_gradient_sum(source):
            _erase_sums(source)
