"""Memory of all graphs of a step: what one graph holds while another one runs.

Behind a graph break a forward runs while what earlier ones have saved is in memory, and a backward runs beside the
sharded gradients of those before it. What a graph returns is counted in the graph that takes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from fsdp_compile.cost.fusion import Kernels
from fsdp_compile.cost.memory import Buffer, Holder, Memory, memory_of
from fsdp_compile.ir.graph import Role, StepGraph, require, role_of

_KEPT_BY_FORWARD = (Holder.SAVED, Holder.UNSHARDED)
_KEPT_BY_BACKWARD = (Holder.SHARD_GRADIENT, Holder.GRADIENT)


def memory_of_step(
    regions: Sequence[Sequence[StepGraph]], kernels: Callable[[StepGraph], Kernels]
) -> list[list[Memory]]:
    """Finds the buffers of all graphs.

    Args:
        regions: In the order in which they run, of each its forward and, when training, its backward.
        kernels: How a graph is run.

    Returns:
        For each region and graph its memory, with what the other regions hold meanwhile.
    """
    alone: list[list[Memory]] = []
    for steps in regions:
        memories: list[Memory] = []
        for step in steps:
            memories.append(memory_of(step, kernels(step), memories[0] if memories else None))
        alone.append(memories)
    return [
        [_beside(memory, _held(alone, number, graph)) for graph, memory in enumerate(memories)]
        for number, memories in enumerate(alone)
    ]


def _held(alone: Sequence[Sequence[Memory]], number: int, graph: int) -> Iterator[Buffer]:
    """What other regions hold while a graph of region `number` runs: the forward (0), or the backward (1)."""
    mine = {claim for buffer in _shards(alone[number][graph]) for claim in require(buffer.node).claims}
    for other in alone:
        for buffer in _shards(other[0]):
            claims = require(buffer.node).claims
            if mine.isdisjoint(claims):
                mine.update(claims)
                yield buffer
    for other in alone[:number]:
        yield from _left(other[0], _KEPT_BY_FORWARD)
    for other in alone[number + 1 :] if graph else ():
        yield from (buffer for memory in other[1:] for buffer in _left(memory, _KEPT_BY_BACKWARD))


def _shards(memory: Memory) -> list[Buffer]:
    """Flat parameters that are inputs of a graph, or of its forward."""
    return [buffer for buffer in memory.buffers if role_of(buffer.node) is Role.FLAT]


def _left(memory: Memory, holders: Sequence[Holder]) -> list[Buffer]:
    """What is in memory when a graph has ended."""
    return [buffer for buffer in memory.buffers if buffer.last == memory.length - 1 and buffer.holder in holders]


def _beside(memory: Memory, held: Iterator[Buffer]) -> Memory:
    kept = (dataclasses.replace(buffer, first=0, last=memory.length - 1) for buffer in held)
    return dataclasses.replace(memory, buffers=(*memory.buffers, *kept))
