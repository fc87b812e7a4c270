"""Every way to spread a model over the ranks that there are, as arguments of `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy

from tests.two_sides import mesh_of

Arguments = Callable[[], dict[str, Any]]
"""Called on every rank, inside the world."""


def _halves(*, shape: Callable[[int], tuple[int, int]] = lambda n: (2, n // 2), **arguments: Any) -> Arguments:
    def make() -> dict[str, Any]:
        return {"mesh": mesh_of(shape(dist.get_world_size())), **arguments}

    return make


STRATEGIES: dict[str, Arguments] = {
    "full": dict,
    "grad-op": lambda: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "integer": lambda: {"reshard_after_forward": 2},
    "no-shard": lambda: {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "hybrid": _halves(),
    "hybrid-zero2": _halves(sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2),
    "hybrid-of-one": _halves(shape=lambda n: (n, 1)),
}
"""Name to arguments; on two ranks "hybrid" has groups of one and "integer" is full sharding, on four groups of two."""

PRECISIONS: dict[str, MixedPrecisionPolicy] = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32),
}
