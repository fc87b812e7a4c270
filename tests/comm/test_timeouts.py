"""Process groups that are made here wait as long as the user said, and not torch's 30 minutes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import fully_shard
from fsdp_compile._torch.distributed import resolve_group, timeout_of
from fsdp_compile.comm import groups
from tests import long
from tests.ranks import run_ranks
from tests.two_sides import compile_eagerly

TIMEOUT_S = 277.0


def _timeouts(settings: dict[str, Any], mesh_shape: tuple[int, ...] | None) -> dict[str, float]:
    names = ("replicate", "shard")[-len(mesh_shape or ()) :]
    mesh = None if mesh_shape is None else init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        model = fully_shard(nn.Linear(8, 8), mesh=mesh, **settings)
    compile_eagerly(model)(torch.ones(2, 8)).sum().backward()
    for place in groups.rank_stores():
        groups.comparing_group(place)  # as outputs that only some ranks use need it
    used = {name: resolve_group(name) for name in groups.aliases}
    made = {purpose: made() for (purpose, _), made in groups.made_groups.items()}
    waits = {str(place.ranks): groups.world_timeout().total_seconds() for place in groups.rank_stores()}
    assert all(group.group_desc == f"fsdp_compile: {purpose}" for purpose, group in made.items() if group is not None)
    every = {name: timeout_of(group) for name, group in (used | made).items() if group is not None}
    return waits | {name: each.total_seconds() for name, each in every.items()}


CASES: list[Any] = [
    ({"separate_reduce_group": True}, (2,), 2, {"fsdp.shard.0", "fsdp.reduce.0"}),
    ({"reshard_after_forward": 2}, (4,), 4, {"fsdp.shard.0", "fsdp.post_forward.0"}),
    ({}, (2, 2), 4, {"fsdp.shard.0", "fsdp.replicate.0"}),
    ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, None, 4, {"fsdp.shard.0", "replicas", "shards"}),
]


@long.parametrize(("settings", "mesh_shape", "ranks", "expected"), CASES, always=CASES[-1:])
def test_every_group_has_the_timeout_of_the_world(
    settings: dict[str, Any], mesh_shape: tuple[int, ...] | None, ranks: int, expected: set[str]
) -> None:
    for found in run_ranks(_timeouts, settings, mesh_shape, world_size=ranks, timeout_s=TIMEOUT_S):
        assert expected <= found.keys()
        assert set(found.values()) == {TIMEOUT_S}
