"""Process groups that are made here: what NCCL is asked for, by calls of torch since no GPU is there, and timeouts."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import fully_shard
from fsdp_compile._torch.distributed import high_priority, new_group, resolve_group, timeout_of
from fsdp_compile.comm import groups
from fsdp_compile.comm.groups import join_world
from fsdp_compile.comm.placement import DeviceKind
from tests import long
from tests.fake_world import fake_world
from tests.ranks import run_ranks
from tests.two_sides import compile_eagerly

TIMEOUT = timedelta(seconds=77)
GPU = torch.device("cuda", 3)


class _Options:
    """Those of `ProcessGroupNCCL`, which this torch may not have."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self._timeout = dist.default_pg_timeout


@pytest.fixture
def nccl() -> Iterator[None]:
    with (
        mock.patch.object(dist, "is_nccl_available", return_value=True),
        mock.patch.object(dist, "ProcessGroupNCCL", types.SimpleNamespace(Options=_Options), create=True),
        mock.patch.object(torch.cuda, "set_device"),
    ):
        yield


def test_streams_have_a_high_priority_where_nccl_runs_collectives(nccl: None) -> None:
    for backends in ("nccl", "cpu:gloo,cuda:nccl"):
        options = high_priority(backends, TIMEOUT)
        assert (options.is_high_priority_stream, options._timeout) == (True, TIMEOUT)
    assert high_priority("gloo", TIMEOUT) is None
    with mock.patch.object(dist, "is_nccl_available", return_value=False):
        assert high_priority("cpu:gloo,cuda:nccl", TIMEOUT) is None


@pytest.mark.usefixtures("nccl")
def test_a_world_that_is_started_here_has_its_communicators_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with mock.patch.object(dist, "init_process_group") as started:
        groups.start_world("cuda")
        with (
            mock.patch("fsdp_compile.comm.groups.torch_rendezvous", return_value=iter([(mock.Mock(), 11, 16)])),
            mock.patch.multiple(dist, get_rank=lambda: 11, get_world_size=lambda: 16, destroy_process_group=lambda: 0),
            join_world(DeviceKind.CUDA, 77.0),
        ):
            pass
        assert len(started.call_args_list) == 2
        for call in started.call_args_list:
            assert (call.args, call.kwargs["device_id"]) == (("nccl",), GPU)
            assert call.kwargs["pg_options"].is_high_priority_stream
        assert started.call_args.kwargs["pg_options"]._timeout == started.call_args.kwargs["timeout"]
        groups.start_world("cpu")
        assert (started.call_args.args, started.call_args.kwargs) == (("gloo",), {})


@contextlib.contextmanager
def _bound_world() -> Iterator[tuple[Any, list[str]]]:
    """A world of 8 ranks that is bound to a device, and whose communicator torch asked to split."""
    split: list[str] = []

    def note(_world: Any) -> None:
        split.append("split")

    with fake_world(8) as world, mock.patch.object(distributed_c10d, "_get_split_source", note):
        world.bound_device_id = GPU
        yield world, split


@pytest.mark.parametrize(("ranks", "splits"), [([0, 1, 2, 3], 0), (list(range(8)), 1)])
def test_a_part_of_the_world_needs_no_other_ranks_for_its_communicator(ranks: list[int], splits: int) -> None:
    # NCCL splits a communicator when all of its ranks take part, and the others do not know of this group.
    with _bound_world() as (world, split):
        made = new_group(ranks, TIMEOUT, "some ranks")
        assert len(split) == splits
        assert made.bound_device_id == world.bound_device_id == GPU
        assert (made.size(), made.group_desc) == (len(ranks), "some ranks")


def test_the_world_stays_bound_when_a_group_cannot_be_made() -> None:
    with _bound_world() as (world, _):
        with mock.patch.object(dist, "new_group", side_effect=RuntimeError("no")), pytest.raises(RuntimeError):
            new_group([0, 1], TIMEOUT, "some ranks")
        assert world.bound_device_id == GPU


@pytest.mark.usefixtures("nccl")
def test_every_group_that_is_made_here_has_streams_of_high_priority() -> None:
    asked: list[Any] = []
    real = dist.new_group

    def note(*args: Any, pg_options: Any, **kwargs: Any) -> Any:
        asked.append(pg_options)
        return real(*args, **kwargs)

    config = mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl")
    alone = mock.patch.object(groups, "_has_processes", return_value=False)
    with fake_world(8) as world, mock.patch.object(dist, "new_group", note), config, alone:
        for make in (
            lambda: groups.alias_of(world, "reduce"),
            lambda: groups.mesh_of_shape("cpu", (2, 4)),
            lambda: groups.comparing_group(groups.RankStore("here", tuple(range(8)), 0)),
        ):
            before = len(asked)
            make()
            assert len(asked) > before
    assert all(options.is_high_priority_stream for options in asked)


GIVEN_S = 277.0


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
    for found in run_ranks(_timeouts, settings, mesh_shape, world_size=ranks, timeout_s=GIVEN_S):
        assert expected <= found.keys()
        assert set(found.values()) == {GIVEN_S}
