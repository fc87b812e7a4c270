"""Experts on a mesh of their own, compiled: equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from tests.models.experts import WIDTH, MixtureOfExperts
from tests.ranks import on_ranks
from tests.two_sides import Within, WithOneProcess

RANKS, TOKENS, STEPS = 4, 10, 3


def _shard(model: MixtureOfExperts) -> None:
    """Experts over (dp, ep), all else over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    every = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("every",))
    for layer in model.layers:
        experts: Any = layer.experts
        experts.split(mesh["ep"])
        fully_shard(experts, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(1))
        experts.set_gradient_divide_factor(RANKS)  # they see the tokens of all ranks
        experts.set_force_sum_reduction_for_comms(True)  # gloo has no other
        fully_shard(layer, mesh=every)
    fully_shard(model, mesh=every)


@pytest.mark.long
@pytest.mark.parametrize("one_expert", [False, True])
@on_ranks(world_size=RANKS)
def test_compiled(*, one_expert: bool) -> None:
    def make() -> MixtureOfExperts:
        model = MixtureOfExperts()
        if one_expert:  # the others, and the ranks that have them, get no tokens
            with torch.no_grad():
                for layer in model.layers:
                    layer.gate.weight.zero_()  # type: ignore[union-attr, operator]
        return model

    pair = WithOneProcess(make, shard=_shard, shape=WIDTH, rows=TOKENS, twice=False)
    bound = (1.3e-6, 1e-5)
    pair.train(steps=STEPS, within=Within(bound, bound, bound))
