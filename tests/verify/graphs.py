"""Captured graphs, each made once per session and handed out as copies."""

from __future__ import annotations

import functools

import torch

from fsdp_compile import MixedPrecision
from fsdp_compile.config.prefetch import FSDPPrefetch
from fsdp_compile.ir.graph import Phase, Stage, StepGraph
from fsdp_compile.layout.flat_layout import ReduceLayout
from fsdp_compile.layout.spec import Update
from tests.models.graphs import MODELS
from tests.verify.captured import World, capture

PAIR = World(2)
SQUARE = World(4, replicas=2)
QUANTIZED = World(2, policy=MixedPrecision(torch.bfloat16, gather_dtype=torch.int8))
FOUR_BITS = World(2, policy=MixedPrecision(torch.bfloat16, gather_dtype="nvfp4"))
UPDATED = World(2, update=Update.IN_BACKWARD)
ALONE = World(1, update=Update.IN_BACKWARD)
KEPT = World(4, reshard_after_forward=2)
LOOKED_UP = World(2, units=("head",), embedding="sharded")
OPEN = World(2, reshard_after_forward="auto")


def graph(
    phase: Phase,
    *,
    model: str = "stack",
    world: World = PAIR,
    stage: Stage = Stage.FINAL,
    prefetch: int | FSDPPrefetch = 1,
    layout: ReduceLayout = ReduceLayout.ALIGNED,
    bucket_mb: float = 0,
) -> StepGraph:
    """A correct graph of one of `MODELS`, which the test may break."""
    forward, backward = _captured(model, world, stage, prefetch, layout, bucket_mb)
    return (forward if phase is Phase.FORWARD else backward).copy()


@functools.cache
def _captured(
    model: str, world: World, stage: Stage, prefetch: int | FSDPPrefetch, layout: ReduceLayout, bucket_mb: float
) -> list[StepGraph]:
    make, inputs = MODELS[model]
    return capture(
        make, inputs(), world, until=stage, prefetch=prefetch, reduce_layout=layout.value, bucket_mb=bucket_mb
    )
