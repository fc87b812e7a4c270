"""The planning problem of a graph before the passes: reads and gradients are markers, a bucket per flat parameter.

It differs from what `from_graph.py` reads off the same graph after the passes by what they add: copies into messages,
and joined or split buckets.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from torch import fx

from fsdp_compile.cost.communicate import EXCHANGED, Kind, exchange
from fsdp_compile.cost.formulas import share_of_others
from fsdp_compile.cost.fusion import Fusion, plan_kernels
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.memory import memory_of
from fsdp_compile.cost.timeline import times_us
from fsdp_compile.ir.edit import sink
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.queries import aliases, parameter_only, read_text, unsharded_value
from fsdp_compile.layout.spec import GradPlacement, UnshardSpec, parse
from fsdp_compile.layout.wire_formats import gathered_bytes
from fsdp_compile.ops.unshard import REDUCE_GRAD, UNSHARD
from fsdp_compile.planner.problem import Gather, Problem, Reduction


@dataclasses.dataclass(frozen=True)
class Outlined:
    """A problem, and the name of the flat parameter's input for each of its all-gathers."""

    problem: Problem
    flats: tuple[str, ...]


def outline(step: StepGraph, hardware: Hardware, fusion: Fusion, *, everything: bool) -> Outlined:
    """Reads the problem off a graph before the passes; the graph is not changed.

    Args:
        step: The graph.
        hardware: What times are estimated for.
        fusion: How the graph will be run.
        everything: Whether all memory of the graph is counted, not that of parameters and gradients alone.
    """
    step = step.copy()
    values = parameter_only(step.graph)
    # The passes compute these right before their first use, too.
    sink(step.graph, values)
    kernels = plan_kernels(step.graph, fusion)
    busy_us = times_us(step.graph, hardware, kernels)
    positions: dict[fx.Node, int] = {}
    steps: list[fx.Node] = []
    apart = {*values, *step.graph.find_nodes(op="call_function", target=REDUCE_GRAD)}
    for node in step.graph.nodes:
        positions[node] = len(steps)
        if node.op == "call_function" and node not in apart:
            steps.append(node)
    gathers = sorted(_gathers(step, positions, frozenset(values), hardware), key=lambda pair: pair[0].need)
    least: tuple[int, ...] = ()
    if everything:
        live = memory_of(step, kernels).live_bytes()
        order = step.order()
        places = [order[node] for node in steps]
        spans = itertools.pairwise([*places, len(live)])
        least = tuple(max(live[begin:end]) + step.beside_bytes for begin, end in spans)
    problem = Problem(
        tuple(
            exchange(node, parse(read_text(node)), hardware).alone_us if node.target in EXCHANGED else busy_us[node]
            for node in steps
        ),
        tuple(gather for gather, _ in gathers),
        tuple(sorted(_reductions(step, positions, hardware), key=lambda reduction: reduction.ready)),
        least,
        exchanges=frozenset(index for index, node in enumerate(steps) if node.target in EXCHANGED),
    )
    return Outlined(problem, tuple(flat for _, flat in gathers))


def _by_flat(markers: Iterable[fx.Node]) -> Mapping[fx.Node, list[fx.Node]]:
    found: dict[fx.Node, list[fx.Node]] = {}
    for marker in markers:
        flat = marker.args[0]
        assert isinstance(flat, fx.Node)
        found.setdefault(flat, []).append(marker)
    return found


def _specs(markers: Iterable[fx.Node]) -> list[UnshardSpec]:
    return [parse(text) for text in dict.fromkeys(map(read_text, markers))]


def _gathers(
    step: StepGraph, positions: Mapping[fx.Node, int], values: frozenset[fx.Node], hardware: Hardware
) -> Iterable[tuple[Gather, str]]:
    reads = (
        node for node in step.graph.find_nodes(op="call_function", target=UNSHARD) if unsharded_value(node) is None
    )
    for flat, markers in _by_flat(reads).items():
        specs = _specs(markers)
        ranks = specs[0].size
        users = [positions[node] for node in _users(markers, values)]
        if ranks == 1 or not users:
            continue
        size_bytes = sum(spec.size * spec.extent * spec.param_dtype.itemsize for spec in specs)
        message_bytes = sum(spec.size * spec.extent * gathered_bytes(spec) for spec in specs)
        sent_bytes = message_bytes * share_of_others(ranks)
        time_us = hardware.collective_us(Kind.GATHER.value, sent_bytes, specs[0].shard_ranks)
        yield Gather(need=min(users), free=1 + max(users), size_bytes=size_bytes, time_us=time_us), flat.name


def _users(markers: Iterable[fx.Node], values: frozenset[fx.Node]) -> set[fx.Node]:
    """The steps that read full parameters, values computed from them alone, or a view of either."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    todo = list(markers)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo += [user for user in node.users if user in values]
        found |= {user for shared in aliases([node]) for user in shared.users if user.op == "call_function"}
    return found - values


def _reductions(step: StepGraph, positions: Mapping[fx.Node, int], hardware: Hardware) -> Iterable[Reduction]:
    for markers in _by_flat(step.graph.find_nodes(op="call_function", target=REDUCE_GRAD)).values():
        specs = _specs(markers)
        first = specs[0]
        size_bytes = sum(spec.size * spec.extent * spec.reduce_dtype.itemsize for spec in specs)
        stages = []
        if first.size > 1 and first.grad_placement is not GradPlacement.UNREDUCED:
            sent_bytes = size_bytes * share_of_others(first.size)
            stages.append(hardware.collective_us(Kind.REDUCE.value, sent_bytes, first.shard_ranks))
        if first.replicas > 1 and first.grad_placement is GradPlacement.REDUCED:
            shard_bytes = size_bytes / first.size
            sent_bytes = 2 * shard_bytes * share_of_others(first.replicas)
            stages.append(hardware.collective_us(Kind.REPLICATE.value, sent_bytes, first.replicate_ranks))
        if stages:
            made = [positions[source] for marker in markers for source in marker.all_input_nodes[1:2]]
            ready = max(positions[marker] for marker in markers)
            yield Reduction(born=min(made, default=ready), ready=ready, size_bytes=size_bytes, stages_us=tuple(stages))
