"""Live bytes at each node of a graph: which node allocates a buffer, and until when it lives.

Views share the memory of what they show (by the operators' schemas), values that stay inside a fused kernel have none,
what a kernel reads lives until it runs, and the messages of a running collective live until it is waited for. Flat
parameters and gradients of offloaded units, which are on the host, have no buffer here.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import getitem

from torch import fx

from fsdp_compile._torch.dynamo import is_saved_for_backward, updated_input
from fsdp_compile.cost.communicate import is_own, own_start_of
from fsdp_compile.cost.fusion import Kernels, shares_memory
from fsdp_compile.cost.sizes import result_bytes, tensor_bytes, tensors_of, tensors_of_value
from fsdp_compile.ir.graph import STARTS, WAITS, Phase, Role, StepGraph, require, role_of


class Holder(enum.Enum):
    """What memory is used for."""

    SHARD = "sharded parameters"
    SHARD_GRADIENT = "sharded gradients"
    UNSHARDED = "gathered units"
    GRADIENT = "unsharded gradients"
    SAVED = "saved for backward"
    INPUT = "inputs and buffers"
    OUTPUT = "outputs"
    TEMPORARY = "temporaries"


_HOLDERS = {
    Role.OFFLOAD_IN: Holder.SHARD,
    Role.GATHER: Holder.UNSHARDED,
    Role.COPY_OUT: Holder.UNSHARDED,
    Role.FULL: Holder.UNSHARDED,
    Role.POST_FORWARD_SHARD: Holder.UNSHARDED,
    Role.GRADIENT: Holder.GRADIENT,
    Role.REDUCE: Holder.SHARD_GRADIENT,
    Role.REPLICATE: Holder.SHARD_GRADIENT,
    Role.SHARD_GRADIENT: Holder.SHARD_GRADIENT,
    Role.FLAT_GRADIENT: Holder.SHARD_GRADIENT,
}


@dataclasses.dataclass(eq=False)
class Buffer:
    """One piece of memory.

    Attributes:
        node: The node that allocates it.
        first: Position of the node that allocates it; 0 for inputs.
        last: Position of the last node that needs it.
    """

    node: fx.Node
    size_bytes: int
    holder: Holder
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of one graph; `outputs` has the buffers behind each node that the graph returns."""

    buffers: tuple[Buffer, ...]
    outputs: Mapping[str, tuple[Buffer, ...]]
    length: int

    def live_bytes(self, holders: Iterable[Holder] = Holder) -> list[int]:
        """Bytes that are live while each node runs, in graph order; only those of `holders`."""
        change = [0] * (self.length + 1)
        wanted = frozenset(holders)
        for buffer in self.buffers:
            if buffer.holder in wanted:
                change[buffer.first] += buffer.size_bytes
                change[buffer.last + 1] -= buffer.size_bytes
        return list(itertools.accumulate(change[:-1]))

    def at(self, position: int) -> list[Buffer]:
        """Buffers that are live while a node runs, largest first."""
        live = [b for b in self.buffers if b.first <= position <= b.last and b.size_bytes]
        return sorted(live, key=lambda b: -b.size_bytes)


Held = tuple[Buffer, ...]


def memory_of(step: StepGraph, kernels: Kernels, before: Memory | None = None) -> Memory:
    """Finds the buffers of a graph.

    `before`, for a backward graph, is the memory of its forward, whose inputs and outputs are still live.
    """
    return _Walk(step, kernels, before).memory()


def bytes_beside(forward: StepGraph, backward: StepGraph) -> int:
    """Bytes that are live while a backward runs, and are not in its graph.

    Inputs of its forward that it does not take, such as frozen parameters, and outputs without a gradient, such as
    metrics. Outputs with one are counted by it, since they have as many bytes (`planner/from_graph.py`).
    """
    taken = {node.name for node in backward.graph.find_nodes(op="placeholder")}
    left = (node for node in forward.graph.find_nodes(op="placeholder") if node.name not in taken)
    inputs = sum(result_bytes(node) for node in left if not _is_on_host(node))
    notes = _outputs(forward)
    outputs = {node: None for node, note in notes if not is_saved_for_backward(note) and updated_input(note) is None}
    tangents = (node for node in backward.graph.find_nodes(op="placeholder") if node.name.startswith("tangents"))
    return inputs + max(0, sum(map(result_bytes, outputs)) - sum(map(result_bytes, tangents)))


def _outputs(step: StepGraph) -> list[tuple[fx.Node, object]]:
    """The nodes that a graph returns, each with AOTAutograd's description."""
    returned = step.output.args[0]
    nodes = returned if isinstance(returned, tuple | list) else (returned,)
    notes = step.output.meta.get("desc") or ()
    described = itertools.zip_longest(nodes, notes[: len(nodes)])
    return [(node, note) for node, note in described if isinstance(node, fx.Node)]


class _Walk:
    """One pass over a graph that records, for each node, the buffers behind each of its results."""

    def __init__(self, step: StepGraph, kernels: Kernels, before: Memory | None) -> None:
        self.step = step
        self.kernels = kernels
        self.before = before
        self.end = len(step.graph.nodes) - 1
        self.behind: dict[fx.Node, list[Held]] = {}
        self.in_flight: dict[Buffer, Held] = {}
        self.buffers: list[Buffer] = []
        self.carried: dict[Buffer, Buffer] = {}

    def memory(self) -> Memory:
        places = {node: place for place, node in enumerate(self.step.graph.nodes)}
        for node, place in places.items():
            forced_by = self.kernels.forced.get(node)
            position = place if forced_by is None else places[forced_by] - 1
            # The marker of a reshard names a whole bucket; each message of it is freed after its own last use.
            for source in () if role_of(node) is Role.RESHARD else node.all_input_nodes:
                self._touch(self._all(source), position)
            self.behind[node] = self._results(node, position)
        self._name_outputs()
        # Outputs of the forward, and those of its inputs that this graph does not take: its caller has them.
        taken = {node.name for node in self.step.graph.find_nodes(op="placeholder")}
        for buffer in self.before.buffers if self.before is not None else ():
            is_left = buffer.node.op == "placeholder" and buffer.node.name not in taken
            if buffer not in self.carried and (is_left or buffer.holder is Holder.OUTPUT):
                self.buffers.append(dataclasses.replace(buffer, first=0, last=self.end))
        outputs = {node.name: self._all(node) for node in self.step.output.all_input_nodes}
        return Memory(tuple(self.buffers), outputs, self.end + 1)

    def _all(self, node: fx.Node) -> Held:
        return tuple(dict.fromkeys(buffer for held in self.behind[node] for buffer in held))

    def _touch(self, held: Iterable[Buffer], position: int) -> None:
        for buffer in held:
            buffer.last = max(buffer.last, position)

    def _results(self, node: fx.Node, position: int) -> list[Held]:
        if node.op == "placeholder":
            return [self._input(node)]
        if node.op != "call_function":
            return []
        if node.target is getitem and len(self.behind[node.all_input_nodes[0]]) > 1:
            return [self.behind[node.all_input_nodes[0]][node.args[1]]]  # type: ignore[index]
        if shares_memory(node):
            shared = self._all(node.all_input_nodes[0])
            if role_of(node) in WAITS or own_start_of(node) is not None:
                for buffer in shared:
                    self._touch(self.in_flight.get(buffer, ()), position)
            return [shared]
        sources = tuple(dict.fromkeys(b for n in node.all_input_nodes for b in self._all(n)))
        if node in self.kernels.inner:
            return [sources]  # its readers are in the same kernel, and read what it is made of
        return self._allocate(node, position, sources)

    def _allocate(self, node: fx.Node, position: int, sources: Held) -> list[Held]:
        role = role_of(node)
        if role is Role.OFFLOAD_OUT:
            return [()]
        holder = _HOLDERS.get(role, Holder.TEMPORARY) if role is not None else Holder.TEMPORARY
        value = node.meta.get("val")
        # A result may be `None` (the gradient of an input that needs none), and still has a place among the results.
        results = [tensors_of_value(result) for result in (value if isinstance(value, tuple | list) else [value])]
        of_each = [tuple(Buffer(node, tensor_bytes(t), holder, position, position) for t in each) for each in results]
        made = [buffer for held in of_each for buffer in held]
        self.buffers += made
        if role in STARTS or is_own(node):
            # A running collective reads its inputs until the wait, see `_results`.
            self.in_flight.update(dict.fromkeys(made, sources))
        # What becomes a message was an unsharded gradient, although a node of the model's own computed it.
        if role in (Role.GRADIENT, Role.REDUCE, Role.REPLICATE):
            for buffer in sources:
                if buffer.holder is Holder.TEMPORARY:
                    buffer.holder = Holder.GRADIENT
        return of_each

    def _input(self, node: fx.Node) -> Held:
        if role_of(node) is Role.FLAT:
            return () if _is_on_host(node) else self._hold(node, Holder.SHARD, self.end)
        if role_of(node) is Role.SAVED_PARAM:
            return self._hold(node, Holder.UNSHARDED, 0)
        if role_of(node) is Role.UNSHARDED_PARAM:
            return self._hold(node, Holder.UNSHARDED, self.end)
        if self.step.phase is Phase.FORWARD or node.name.startswith("primals"):
            return self._hold(node, Holder.INPUT, self.end)
        earlier = self.before.outputs.get(node.name) if self.before is not None else None
        if earlier is None:
            tangent = node.name.startswith("tangents")
            return self._hold(node, Holder.TEMPORARY if tangent else Holder.SAVED, 0)
        return tuple(self._carry(buffer) for buffer in earlier)

    def _hold(self, node: fx.Node, holder: Holder, last: int) -> Held:
        held = tuple(Buffer(node, tensor_bytes(t), holder, 0, last) for t in tensors_of(node))
        self.buffers += held
        return held

    def _carry(self, buffer: Buffer) -> Buffer:
        """A buffer that forward saved, in backward: freed after its last use unless the caller or the model has it."""
        if buffer not in self.carried:
            stays = buffer.holder in (Holder.SHARD, Holder.INPUT, Holder.OUTPUT)
            self.carried[buffer] = dataclasses.replace(buffer, first=0, last=self.end if stays else 0)
            self.buffers.append(self.carried[buffer])
        return self.carried[buffer]

    def _name_outputs(self) -> None:
        """Tells buffers that are returned from those that are saved for backward; one that is both is returned."""
        for node, note in _outputs(self.step):
            if updated_input(note) is not None:  # it is written into an input when forward returns, and freed
                continue
            saved = is_saved_for_backward(note)
            for buffer in self._all(node):
                if buffer.holder is Holder.TEMPORARY or (buffer.holder is Holder.SAVED and not saved):
                    buffer.holder = Holder.SAVED if saved else Holder.OUTPUT


def _is_on_host(node: fx.Node) -> bool:
    return role_of(node) is Role.FLAT and bool(require(node).specs[0].compute)


def memory_of_step(
    regions: Sequence[Sequence[StepGraph]], kernels: Callable[[StepGraph], Kernels]
) -> list[list[Memory]]:
    """Finds the buffers of all graphs of a step, with what one graph holds while another one runs.

    Behind a graph break a forward runs while what earlier ones have saved is in memory, and a backward runs beside the
    sharded gradients of those before it. What a graph returns is counted in the graph that takes it.

    Regions are in the order in which they run: of each its forward and, when training, its backward.
    """
    alone: list[list[Memory]] = []
    for forward, *backward in regions:
        first = memory_of(forward, kernels(forward))
        alone.append([first, *(memory_of(step, kernels(step), first) for step in backward)])

    def with_others(number: int, graph: int, memory: Memory) -> Memory:
        held = (dataclasses.replace(b, first=0, last=memory.length - 1) for b in _of_others(alone, number, graph))
        return dataclasses.replace(memory, buffers=(*memory.buffers, *held))

    return [[with_others(i, k, memory) for k, memory in enumerate(memories)] for i, memories in enumerate(alone)]


def _of_others(alone: Sequence[Sequence[Memory]], number: int, graph: int) -> Iterator[Buffer]:
    """What other regions hold while a graph of region `number` runs: the forward (0), or the backward (1)."""
    mine = {claim for buffer in _shards(alone[number][graph]) for claim in require(buffer.node).claims}
    for other in alone:
        for buffer in _shards(other[0]):
            claims = require(buffer.node).claims
            if mine.isdisjoint(claims):
                mine.update(claims)
                yield buffer
    for other in alone[:number]:
        yield from _left(other[0], Holder.SAVED, Holder.UNSHARDED)
    for other in alone[number + 1 :] if graph else ():
        yield from (buffer for memory in other[1:] for buffer in _left(memory, Holder.SHARD_GRADIENT, Holder.GRADIENT))


def _shards(memory: Memory) -> list[Buffer]:
    """Flat parameters that are inputs of a graph, or of its forward."""
    return [buffer for buffer in memory.buffers if role_of(buffer.node) is Role.FLAT]


def _left(memory: Memory, *holders: Holder) -> list[Buffer]:
    """What is in memory when a graph has ended."""
    return [buffer for buffer in memory.buffers if buffer.last == memory.length - 1 and buffer.holder in holders]
