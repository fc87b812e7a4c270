"""Saves that each rank plans for itself: every chunk is written once, and torch's own loads find all of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fsdp_compile.formats.dcp import SafeReader
from fsdp_compile.training.save_plan import OwnPlanner, PlannedWriter
from tests import long
from tests.ranks import run_ranks


def _full(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) + 1


VALUES = {
    "even": _full((8, 3)),
    "uneven": _full((7, 2)),
    "few rows": _full((2, 5), torch.bfloat16),
    "no rows": _full((0, 4)),
    "columns": _full((3, 9)),
    "scalar": _full(()),
}


def _state(mesh_shape: tuple[int, ...]) -> dict[str, Any]:
    """Nested values of each kind, sharded over the last dimension of a mesh."""
    mesh = init_device_mesh("cpu", mesh_shape)
    replicated: list[Placement] = [Replicate()] * (mesh.ndim - 1)
    last: dict[str, Placement] = {"columns": Shard(1), "scalar": Replicate()}
    sharded = {
        name: distribute_tensor(value, mesh, [*replicated, last.get(name, Shard(0))]) for name, value in VALUES.items()
    }
    again = distribute_tensor(VALUES["even"] * 2, mesh, [*replicated, Shard(0)])
    return {"model": sharded, "optimizer": {"average": again, "step": torch.tensor(3.0), "groups": [{"lr": 0.5}]}}


def _save(folder: Path, state: dict[str, Any]) -> bool:
    planner = OwnPlanner(dist.get_rank(), dist.get_world_size())
    dcp.save(state, storage_writer=PlannedWriter(folder, planner), planner=planner)
    return planner.plans_itself


def _save_both_ways(folder: Path, mesh_shape: tuple[int, ...]) -> None:
    state = _state(mesh_shape)
    assert _save(folder / "own", state)
    dcp.save(state, checkpoint_id=folder / "torch")


def _chunks(metadata: Metadata) -> dict[str, Any]:
    """What torch's metadata says of each value, without chunks that have no elements."""
    return {
        name: (value.size, value.properties, [chunk for chunk in value.chunks if 0 not in chunk.sizes])
        if isinstance(value, TensorStorageMetadata)
        else value
        for name, value in metadata.state_dict_metadata.items()
    }


def _load(folder: Path, mesh_shape: tuple[int, ...]) -> None:
    state = _state(mesh_shape)
    for value in (*state["model"].values(), state["optimizer"]["average"]):
        value.to_local().zero_()
    state["optimizer"] |= {"step": torch.tensor(0.0), "groups": [{"lr": 0.0}]}
    dcp.load(state, checkpoint_id=folder)
    for name, value in VALUES.items():
        assert state["model"][name].full_tensor().equal(value), name
    assert state["optimizer"]["average"].full_tensor().equal(VALUES["even"] * 2)
    assert (state["optimizer"]["step"].item(), state["optimizer"]["groups"]) == (3.0, [{"lr": 0.5}])


@long.parametrize("mesh", [(1,), (2,), (3,), (2, 2)], always=[(2, 2)])
def test_metadata_is_torchs_and_every_chunk_is_written_once(mesh: tuple[int, ...], tmp_path: Path) -> None:
    ranks = torch.Size(mesh).numel()
    run_ranks(_save_both_ways, tmp_path, mesh, world_size=ranks)
    own, torchs = (SafeReader(tmp_path / name).read_metadata() for name in ("own", "torch"))
    assert _chunks(own) == _chunks(torchs)
    assert own.planner_data == torchs.planner_data
    held = {
        (name, tuple(chunk.offsets))
        for name, value in _chunks(torchs).items()
        if isinstance(value, tuple)
        for chunk in value[2]
    }
    written = Counter((index.fqn, tuple(index.offset)) for index in own.storage_data if index.offset is not None)
    assert held <= written.keys()
    assert set(written.values()) == {1}
    for index in own.storage_data:
        value = own.state_dict_metadata[index.fqn]
        if isinstance(value, TensorStorageMetadata):
            assert value.chunks[index.index].offsets == index.offset
    files = {info.relative_path for info in own.storage_data.values()}
    assert files == {f"__{rank}_0.distcp" for rank in range(ranks)}, "replicas share the work"
    for other in ((1,), (2,), (2, 2)):
        run_ranks(_load, tmp_path / "own", other, world_size=torch.Size(other).numel())


def _save_elsewhere(folder: Path) -> bool:
    """One DTensor of two of three ranks, which others know nothing of."""
    part = DeviceMesh("cpu", [0, 2])
    if dist.get_rank() == 1:
        state = {
            "a": DTensor.from_local(
                torch.empty(0), part, [Shard(0)], run_check=False, shape=torch.Size((4,)), stride=(1,)
            )
        }
    else:
        state = {"a": DTensor.from_local(torch.full((2,), dist.get_rank()), part, [Shard(0)], run_check=False)}
    return _save(folder, state)


def test_torchs_way_is_taken_for_other_meshes(tmp_path: Path) -> None:
    assert run_ranks(_save_elsewhere, tmp_path, world_size=3) == [False] * 3
    run_ranks(_load_elsewhere, tmp_path)


def _load_elsewhere(folder: Path) -> None:
    state = {"a": distribute_tensor(torch.zeros(4, dtype=torch.int64), init_device_mesh("cpu", (2,)), [Shard(0)])}
    dcp.load(state, checkpoint_id=folder)
    assert state["a"].full_tensor().tolist() == [0, 0, 2, 2]


def _save_different(folder: Path) -> str:
    state = _state((2,))
    if dist.get_rank() == 1:
        state["optimizer"]["more"] = 1
    with pytest.raises(CheckpointException) as caught:
        _save(folder, state)
    return str(caught.value)


def test_ranks_that_save_different_things_are_told_apart(tmp_path: Path) -> None:
    for message in run_ranks(_save_different, tmp_path):
        assert "of what rank 1 saves are not those of rank 0" in message
