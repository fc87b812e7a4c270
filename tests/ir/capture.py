"""The graphs that the pipeline makes of a small model, as they are before and after every pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_compile.capture.flat_inputs import flat_inputs
from fsdp_compile.ir.graph import Phase, Record, StepGraph, record_of
from fsdp_compile.ir.text.printer import format_graph
from fsdp_compile.lower.eager import compile_eagerly
from fsdp_compile.lower.region import Region
from fsdp_compile.options import FSDPOptions
from fsdp_compile.pipeline import passes
from tests.fake_world import fake_world
from tests.own_backend import compiled_by


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """One graph at one moment.

    Attributes:
        after: Name of the pass that has just run, "capture" before the first.
        phase: Which graph it is.
        text: Its text.
        records: The records of its nodes by name.
    """

    after: str
    phase: Phase
    text: str
    records: dict[str, Record]


def records_of(step: StepGraph) -> dict[str, Record]:
    found = {node.name: record_of(node) for node in step.graph.nodes}
    return {name: record for name, record in found.items() if record is not None}


def take(step: StepGraph, after: str) -> Snapshot:
    return Snapshot(after, step.phase, format_graph(step), records_of(step))


def capture(
    make_model: Callable[[], nn.Module],
    inputs: Sequence[Any],
    *,
    world_size: int,
    rank: int = 0,
    dynamic: bool | None = None,
) -> list[Snapshot]:
    """Compiles forward and backward of a model in a fake world.

    Args:
        make_model: Makes the model and shards it.
        inputs: Arguments of its forward; the sum of the result is differentiated.
        world_size: Ranks, of which all but this process's do not exist.
        rank: This process's.
        dynamic: As for `torch.compile`.
    """
    found: list[Snapshot] = []

    def transform(step: StepGraph) -> StepGraph:
        found.append(take(step, "capture"))
        for graph_pass in passes(FSDPOptions()):
            graph_pass.apply(step, graph_pass.plan(step))
            found.append(take(step, graph_pass.name))
        return step

    def compile_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return compile_eagerly(gm, example_inputs, Region(flat_inputs(example_inputs), transform))

    with fake_world(world_size, rank=rank):
        model = make_model()
        compiled_by(compile_graph, model, dynamic=dynamic)(*inputs).sum().backward()
    return found
