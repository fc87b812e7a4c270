"""Models and batches that other processes import, and the faults that are planted in them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import Node

from fsdp_compile import pipeline
from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import Role, Stage, StepGraph, require
from fsdp_compile.options import FSDPOptions
from fsdp_compile.passes.insert_collectives import InsertCollectives
from tests.models.kinds import WIDTH, Slim

PLANTED = "blocks.1.0.weight"
PLANTED_PASS = "planted-fault"
_PASSES = pipeline.passes


def make_model() -> nn.Module:
    return Slim()


def make_batch(step: int) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))


def shard(model: nn.Module, fully_shard: Callable[[nn.Module], nn.Module]) -> None:
    fully_shard(model)


class ScaleOneGradient:
    """The fault: what is reduced for `PLANTED` is multiplied by 1 + 2^-10."""

    name = PLANTED_PASS
    requires, ensures = Stage.BUCKETED, Stage.BUCKETED

    def plan(self, step: StepGraph) -> list[Node]:
        return [node for node in step.nodes(Role.REDUCE) if require(node).parameters == (PLANTED,)]

    def apply(self, step: StepGraph, plan: list[Node]) -> None:
        for node in plan:
            (message,) = node.all_input_nodes
            record = dataclasses.replace(require(node), role=Role.GRADIENT)
            with step.graph.inserting_before(node):
                scaled = GraphBuilder(step.graph, record, node).call(torch.ops.aten.mul.Tensor, message, 1 + 2.0**-10)
            node.replace_input_with(message, scaled)


def passes_with_fault(options: FSDPOptions, **how: bool) -> tuple[object, ...]:
    first, *rest = _PASSES(options, **how)
    assert isinstance(first, InsertCollectives)
    return (first, ScaleOneGradient(), *rest)


def _approve(*_args: object, **_kwargs: object) -> None:
    """In the place of the rules, which would find the fault first."""


def make_model_with_planted_bug() -> nn.Module:
    """Called in the processes of a comparison alone: the fault reaches the compiled side, and only there."""
    pipeline.passes = passes_with_fault  # type: ignore[assignment]
    pipeline.check = _approve
    return make_model()


def raises_on_one_rank(step: int) -> torch.Tensor:
    if dist.get_rank() == 1:
        raise ArithmeticError("planted in a batch")
    return make_batch(step)


def dies_on_one_rank(step: int) -> torch.Tensor:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    return make_batch(step)


def odd_batch(step: int) -> torch.Tensor:
    return make_batch(step)[:3]
