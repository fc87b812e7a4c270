"""The planning problem of a graph, and the nodes that its numbers stand for: after the passes (`pose`), or before them.

Before the passes, reads and gradients are markers, and a bucket is a flat parameter (`outline`). What the passes add is
not in that problem: copies into messages, and joined or split buckets.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import fx

from fsdp_compile.cost.communicate import EXCHANGED, Kind, communication, exchange
from fsdp_compile.cost.fusion import Fusion, plan_kernels, shares_memory
from fsdp_compile.cost.hardware import Hardware, share_of_others
from fsdp_compile.cost.memory import Memory, memory_of
from fsdp_compile.cost.sizes import result_bytes
from fsdp_compile.cost.timeline import times_us, waits_of
from fsdp_compile.ir.edit import sink
from fsdp_compile.ir.graph import EXCHANGES, SENT, Phase, Role, StepGraph, require, role_of
from fsdp_compile.ir.queries import aliases, parameter_only, read_text, unsharded_value, upstream
from fsdp_compile.layout.spec import GradPlacement, Reshard, UnshardSpec, parse
from fsdp_compile.layout.wire_formats import gathered_bytes
from fsdp_compile.ops.unshard import REDUCE_GRAD, UNSHARD
from fsdp_compile.planner.problem import Gather, Problem, Reduction, Saved


@dataclasses.dataclass(frozen=True)
class Posed:
    """A problem, and the nodes behind it: of each step, of each all-gather, and of each reduction's stages."""

    problem: Problem
    steps: tuple[fx.Node, ...]
    gathers: tuple[fx.Node, ...]
    reductions: tuple[tuple[fx.Node, ...], ...]


def pose(
    step: StepGraph,
    chains: Sequence[Sequence[fx.Node]],
    moved: frozenset[fx.Node],
    hardware: Hardware,
    fusion: Fusion,
) -> Posed:
    """Reads the problem off a graph whose collectives are grouped and not scheduled yet.

    `chains` are the nodes that start the stages of each reduction, in graph order of the first. Nodes in `moved` are
    moved together with collectives by a plan; every other node is a step.
    """
    busy_us = times_us(step.graph, hardware, plan_kernels(step.graph, fusion))
    starts = {*step.nodes(Role.GATHER), *(start for chain in chains for start in chain)}
    items = step.nodes(Role.REDUCE_ITEM, Role.REPLICATE_ITEM)  # they move with the start of their reduction
    positions, steps = _steps(step.graph, {*moved, *starts, *items})
    gathers = [(node, _gather(node, positions, len(steps), hardware)) for node in step.nodes(Role.GATHER)]
    gathers.sort(key=lambda pair: pair[1].need)
    copies: dict[int, list[fx.Node]] = {}  # to the host, by the last reduction that must be over for them
    for node, (number, _) in _stages_behind(step, chains).items():
        if role_of(node) is Role.OFFLOAD_OUT:
            copies.setdefault(number, []).append(node)
    problem = Problem(
        tuple(
            communication(node, hardware).alone_us if role_of(node) in EXCHANGES else busy_us[node] for node in steps
        ),
        tuple(gather for _, gather in gathers),
        tuple(_reduction(chain, positions, copies.get(number, ()), hardware) for number, chain in enumerate(chains)),
        saved=_saved(step, positions),
        exchanges=frozenset(index for index, node in enumerate(steps) if role_of(node) in EXCHANGES),
    )
    return Posed(problem, tuple(steps), tuple(node for node, _ in gathers), tuple(map(tuple, chains)))


def _steps(graph: fx.Graph, apart: Collection[fx.Node]) -> tuple[dict[fx.Node, int], list[fx.Node]]:
    """For each node the position that it is reached at, and the steps: all calls but those that are `apart`."""
    positions: dict[fx.Node, int] = {}
    steps: list[fx.Node] = []
    for node in graph.nodes:
        positions[node] = len(steps)
        if node.op == "call_function" and node not in apart:
            steps.append(node)
    return positions, steps


def _stages_behind(step: StepGraph, chains: Sequence[Sequence[fx.Node]]) -> Mapping[fx.Node, tuple[int, int]]:
    """For each start of a stage and all that follows, the last reduction, and its stage, that must have started."""
    found = {start: (number, stage) for number, chain in enumerate(chains) for stage, start in enumerate(chain)}
    for node in step.graph.nodes:
        before = [found[source] for source in node.all_input_nodes if source in found]
        if before:
            # Messages of several reductions meet in one flat gradient: what follows waits for the latest of them.
            found.setdefault(node, max(before))
    return found


def count_everything(step: StepGraph, posed: Posed, fusion: Fusion) -> Posed:
    """The same problem with everything in memory: shards, activations, inputs, gradients of earlier microbatches."""
    kernels = plan_kernels(step.graph, fusion)
    # The caller still has the outputs of forward during backward. The backward graph does not see them, but they have
    # as many bytes as the gradients that come in for them.
    memory = memory_of(step, kernels)
    live = memory.live_bytes()
    order, beside_bytes = step.order(), step.beside_bytes + accumulated_bytes(step)
    if step.phase is Phase.BACKWARD:
        inputs = step.graph.find_nodes(op="placeholder")
        beside_bytes += sum(result_bytes(node) for node in inputs if node.name.startswith("tangents"))
    places = [order[node] for node in posed.steps]
    # What a kernel is made to write for a step, or for a reduction that starts there, it writes after all else that is
    # started there, one place earlier.
    begins = [0, *places[1:]][: len(places)]
    forcing = frozenset(kernels.forced.values())
    starts = zip((chain[0] for chain in posed.reductions), posed.problem.reductions, strict=True)
    forced = [(node, index) for index, node in enumerate(posed.steps)] + [(start, r.ready) for start, r in starts]
    for node, index in forced:
        if node in forcing and index < len(begins):
            begins[index] = max(min(begins[index], order[node] - 1), 0)
    ends = [*places[1:], len(live)]
    least = tuple(max(live[begin:end]) + beside_bytes for begin, end in zip(begins, ends, strict=False))
    late = _late_bytes(step, posed, memory)
    reductions = tuple(
        dataclasses.replace(reduction, late_bytes=each)
        for reduction, each in zip(posed.problem.reductions, late, strict=True)
    )
    problem = dataclasses.replace(posed.problem, least_bytes=least, reductions=reductions)
    return dataclasses.replace(posed, problem=problem)


def accumulated_bytes(step: StepGraph) -> int:
    """Bytes of the gradients that earlier microbatches have left for a later reduction, where a graph leaves some, too.

    The graph does not see their memory: autograd adds the gradients that it returns to them when it has ended, so that
    both are there until then. A graph that reduces takes them as inputs. The first microbatch of a step is planned as
    if it had them.
    """
    specs = (spec for flat in step.nodes(Role.FLAT) for spec in require(flat).specs)
    waiting = ((s, s.size if s.grad_placement is GradPlacement.UNREDUCED else 1) for s in specs)
    return sum(
        parts * spec.extent * spec.unreduced_dtype.itemsize
        for spec, parts in waiting
        if spec.grad_placement is not GradPlacement.REDUCED
    )


def _late_bytes(step: StepGraph, posed: Posed, memory: Memory) -> list[tuple[int, ...]]:
    """For each stage of each reduction, what it sends, and what it and all up to the next stage make and free again.

    What they make and the graph returns is counted from the start of the reduction on, whenever that is waited for.
    """
    found = [[sum(map(result_bytes, start.all_input_nodes)) for start in chain] for chain in posed.reductions]
    behind = _stages_behind(step, posed.reductions)
    for buffer in memory.buffers:
        if buffer.node in behind and buffer.last < memory.length - 1:
            number, stage = behind[buffer.node]
            found[number][stage] += buffer.size_bytes
    return [tuple(each) for each in found]


def _gather(start: fx.Node, positions: Mapping[fx.Node, int], end: int, hardware: Hardware) -> Gather:
    sent = upstream(start, *SENT)
    copies = [node for node in sent if role_of(node) is Role.OFFLOAD_IN]
    waits = waits_of(start)
    received = [*waits, *(user for user in start.users if role_of(user) is Role.GATHER_ITEM)]
    held = aliases(waits)
    users = {user for node in held for user in node.users}
    leaves = any(user.op == "output" for user in users)
    # Anything else that leaves the graph unsharded was asked for by the user, and is in memory until the end.
    kept = leaves and any(spec.reshard is Reshard.AUTO for spec in require(start).specs)
    used = [node for node in (*users, *held) if node.op != "output"]
    return Gather(
        need=min(positions[node] for node in received),
        # A reduction that sends a gathered parameter as it is may read it behind the last step.
        free=end if leaves and not kept else min(end, 1 + max(positions[node] for node in used)),
        size_bytes=result_bytes(start),
        time_us=communication(start, hardware).alone_us,
        sent_bytes=sum(result_bytes(node) for node in sent if not shares_memory(node)),
        copy_us=sum(communication(node, hardware).alone_us for node in copies),
        copy_bytes=sum(map(result_bytes, copies)),
        kept=kept,
        unit=_unsplit(start),
    )


def _unsplit(start: fx.Node) -> str:
    """Names the bucket that a collective is, or is a part of; empty where several units are joined in it."""
    record = require(start)
    spec = record.specs[0]
    dtype = spec.wire_dtype if record.role is Role.GATHER else spec.reduce_dtype
    return "" if record.owners else f"{record.unit} {spec.group} {dtype}"


def _saved(step: StepGraph, positions: Mapping[fx.Node, int]) -> tuple[Saved, ...]:
    """The buckets that forward saved, one for each flat parameter."""
    found: dict[str, list[fx.Node]] = {}
    for node in step.nodes(Role.SAVED_PARAM):
        found.setdefault(require(node).unit, []).append(node)
    saved = []
    for inputs in found.values():
        held = aliases(inputs)
        used = [positions[node] for node in {user for node in held for user in node.users} | set(held) - set(inputs)]
        size_bytes = sum(map(result_bytes, inputs))
        saved.append(Saved(need=min(used), free=1 + max(used), size_bytes=size_bytes))
    return tuple(saved)


def _reduction(
    chain: Sequence[fx.Node], positions: Mapping[fx.Node, int], copies: Sequence[fx.Node], hardware: Hardware
) -> Reduction:
    first = chain[0]
    made = [first, *upstream(first, Role.GRADIENT)]
    gradients = {source for node in made for source in node.all_input_nodes if role_of(source) is not Role.GRADIENT}
    return Reduction(
        born=min(positions[node] for node in gradients),
        ready=positions[first],
        size_bytes=sum(map(result_bytes, first.all_input_nodes)),
        stages_us=tuple(communication(start, hardware).alone_us for start in chain),
        copy_us=sum(communication(node, hardware).alone_us for node in copies),
        unit=_unsplit(first),
    )


def outline(step: StepGraph, hardware: Hardware, fusion: Fusion, *, everything: bool) -> Problem:
    """Reads the problem off a graph before the passes; the graph is not changed.

    Each flat parameter is a unit, which has the name of its input. `everything`: all memory of the graph is counted,
    not that of parameters and gradients alone.
    """
    step = step.copy()
    values = parameter_only(step.graph)
    # The passes compute these right before their first use, too.
    sink(step.graph, values)
    kernels = plan_kernels(step.graph, fusion)
    busy_us = times_us(step.graph, hardware, kernels)
    reductions = step.graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    positions, steps = _steps(step.graph, {*values, *reductions})
    least: tuple[int, ...] = ()
    if everything:
        live = memory_of(step, kernels).live_bytes()
        order = step.order()
        places = [order[node] for node in steps]
        spans = itertools.pairwise([*places, len(live)])
        least = tuple(max(live[begin:end]) + step.beside_bytes for begin, end in spans)
    return Problem(
        tuple(
            exchange(node, parse(read_text(node)), hardware).alone_us if node.target in EXCHANGED else busy_us[node]
            for node in steps
        ),
        tuple(sorted(_marked_gathers(step, positions, frozenset(values), hardware), key=lambda g: g.need)),
        tuple(sorted(_marked_reductions(step, positions, hardware), key=lambda reduction: reduction.ready)),
        least,
        exchanges=frozenset(index for index, node in enumerate(steps) if node.target in EXCHANGED),
    )


def _by_flat(markers: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, list[fx.Node], list[UnshardSpec]]]:
    """Flat parameters with their markers, and the specs of these."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for marker in markers:
        found.setdefault(marker.all_input_nodes[0], []).append(marker)
    for flat, of_flat in found.items():
        yield flat, of_flat, [parse(text) for text in dict.fromkeys(map(read_text, of_flat))]


def _marked_gathers(
    step: StepGraph, positions: Mapping[fx.Node, int], values: frozenset[fx.Node], hardware: Hardware
) -> Iterator[Gather]:
    reads = step.graph.find_nodes(op="call_function", target=UNSHARD)
    for flat, markers, specs in _by_flat(node for node in reads if unsharded_value(node) is None):
        ranks = specs[0].size
        users = [positions[node] for node in _marked_readers(markers, values)]
        if ranks == 1 or not users:
            continue
        size_bytes = sum(spec.size * spec.extent * spec.param_dtype.itemsize for spec in specs)
        message_bytes = sum(spec.size * spec.extent * gathered_bytes(spec) for spec in specs)
        sent_bytes = message_bytes * share_of_others(ranks)
        time_us = hardware.collective_us(Kind.GATHER.value, sent_bytes, specs[0].shard_ranks)
        need, free = min(users), 1 + max(users)
        yield Gather(need=need, free=free, size_bytes=size_bytes, time_us=time_us, unit=flat.name)


def _marked_readers(markers: Iterable[fx.Node], values: frozenset[fx.Node]) -> set[fx.Node]:
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


def _marked_reductions(step: StepGraph, positions: Mapping[fx.Node, int], hardware: Hardware) -> Iterator[Reduction]:
    for _, markers, specs in _by_flat(step.graph.find_nodes(op="call_function", target=REDUCE_GRAD)):
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
