"""Graphs of small models, as the pipeline's passes leave them, without lowering."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy

from fsdp_compile import fully_shard, step_in_backward
from fsdp_compile.capture.flat_inputs import flat_inputs
from fsdp_compile.capture.shard_embeddings import shard_lookups
from fsdp_compile.cost.fusion import Fusion
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.ir.graph import Stage, StepGraph
from fsdp_compile.layout.spec import Update
from fsdp_compile.lower.eager import compile_eagerly
from fsdp_compile.lower.region import Region, nothing
from fsdp_compile.options import FSDPOptions
from fsdp_compile.partition.auto_reshard import keep_unsharded
from fsdp_compile.pipeline import passes
from tests.fake_world import fake_world
from tests.own_backend import compiled_by
from tests.two_sides import mesh_of


@dataclasses.dataclass(frozen=True)
class World:
    """Ranks, and how they shard; `replicas` > 1 makes a 2-D mesh."""

    size: int
    replicas: int = 1
    reshard_after_forward: bool | int | Literal["auto"] = True
    policy: MixedPrecisionPolicy = dataclasses.field(default_factory=MixedPrecisionPolicy)
    strategy: ShardingStrategy | None = None
    rank: int = 0
    units: tuple[str, ...] | None = None
    """Names of modules that get a call of their own before the root; `None` leaves the split to the package."""
    root: bool = True
    """Whether the root gets a call, too."""
    update: Update = Update.AFTER_BACKWARD
    embedding: Literal["gathered", "sharded"] = "gathered"
    """As in `FSDPOptions`."""

    def shard(self, model: nn.Module) -> None:
        mesh = mesh_of((self.replicas, self.size // self.replicas) if self.replicas > 1 else (self.size,))
        for name in (*(self.units or ()), *[""] * self.root):
            module = model.get_submodule(name)
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=None if self.strategy is not None else self.reshard_after_forward,
                mp_policy=self.policy,
                sharding_strategy=self.strategy,
            )


Watch = Callable[[StepGraph, str, Stage | None], None]
"""Called with each graph as captured, as "capture" without a stage, and after each pass with what that ensures."""


def capture(
    make: Callable[[], nn.Module],
    inputs: Sequence[torch.Tensor],
    world: World,
    *,
    watch: Watch | None = None,
    until: Stage = Stage.FINAL,
    training: bool = True,
    dynamic: bool | None = None,
    **options: Any,
) -> list[StepGraph]:
    """Compiles a model for a fake world and returns its graphs: forward, then backward if `training`.

    `watch` looks at each graph after each pass; `until` is the stage at which they are returned. `options` are those of
    `FSDPOptions`.
    """
    chosen = FSDPOptions(**{"prefetch": 1, "bucket_mb": 0, **options})
    captured: list[list[StepGraph]] = []

    def transform(step: StepGraph) -> StepGraph:
        _run_passes(step, chosen, until, watch)
        captured[-1].append(step.copy())  # lowering erases the markers
        return step

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        flats = flat_inputs(example_inputs)
        if flats:
            captured.append([])
        if world.embedding == "sharded":
            shard_lookups(gm)
        keep = _keep_what_fits if world.reshard_after_forward == "auto" else nothing
        return compile_eagerly(gm, example_inputs, Region(flats, transform if flats else _unchanged, keep))

    with fake_world(world.size, rank=world.rank):
        torch.manual_seed(0)
        model = make()
        world.shard(model)
        if world.update is Update.IN_BACKWARD:
            step_in_backward(torch.optim.SGD(model.parameters()))
        with torch.set_grad_enabled(training):
            compiled_by(compile_graph, model, fullgraph=True, dynamic=dynamic)(*inputs)
    return captured[-1]


def _keep_what_fits(forward: StepGraph, backward: StepGraph) -> None:
    keep_unsharded(forward, backward, hardware(), Fusion.NONE, budget_bytes=None, margin=4.0)


def _unchanged(step: StepGraph) -> StepGraph:
    """For frames without parameters: casts at the model's ends are compiled by themselves."""
    return step


def _run_passes(step: StepGraph, options: FSDPOptions, until: Stage, watch: Watch | None) -> None:
    if watch is not None:
        watch(step, "capture", None)
    for graph_pass in passes(options):
        graph_pass.apply(step, graph_pass.plan(step))
        if watch is not None:
            watch(step, graph_pass.name, graph_pass.ensures)
        if graph_pass.ensures is until:
            return
