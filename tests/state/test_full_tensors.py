"""`full_tensors`: names and values of the plain model's state dict, one full value at a time."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.shards import own_part, shard_like
from fsdp_compile.state.full_params import full_tensors
from tests import long
from tests.fsdp2.models import batch, local, made, mesh_of, sharded
from tests.ranks import on_ranks, run_ranks


def _assert_is_state_dict(found: dict[str, torch.Tensor], reference: nn.Module) -> None:
    expected = reference.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@long.parametrize("shape", [(1,), (2,), (2, 2)], always=[(2, 2)])
@on_ranks(world_size=lambda shape: torch.Size(shape).numel())
def test_names_and_values_are_those_of_the_plain_model(shape: tuple[int, ...]) -> None:
    reference, model = made(), sharded(shape=shape)
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    compiled: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        model(batch())  # which leaves the root unsharded
    is_first = dist.get_rank() == 0
    for cpu_offload in (False, True):
        _assert_is_state_dict(dict(full_tensors(compiled, cpu_offload=cpu_offload)), reference)
        found = dict(full_tensors(model, rank0_only=True, cpu_offload=cpu_offload))
        if is_first:
            _assert_is_state_dict(found, reference)
        else:
            assert not found
    kept = dict(full_tensors(model.blocks))
    _assert_is_state_dict(kept, reference.blocks)
    for value in kept.values():
        value.zero_()  # it is memory of its own
    _assert_is_state_dict(dict(full_tensors(model)), reference)


@on_ranks(world_size=4)
def test_parts_of_full_values_are_those_that_fsdp2_has() -> None:
    """Parts of full values, under every layout that FSDP2 makes: of columns, and with tensor parallelism."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    columns: Any = fully_shard(nn.Linear(4, 8), mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(p.dim() - 1))
    for name, value in full_tensors(model):
        assert torch.equal(value, expected[name]), name
    every: list[Any] = [*model.parameters(), *columns.parameters()]
    for parameter in every:
        full = parameter.full_tensor()
        for source in (None, 0):
            is_first = not any(parameter.device_mesh.get_coordinate())
            given = full if source is None or is_first else torch.zeros_like(full)
            part = own_part(given, parameter, source=source)
            assert torch.equal(part, local(parameter)), parameter
            assert part.untyped_storage().nbytes() == part.numel() * part.element_size()
        assert torch.equal(shard_like(full, parameter).full_tensor(), full)
    whole = columns.weight.redistribute(placements=[Replicate()])
    assert torch.equal(shard_like(whole.to_local(), whole).to_local(), whole.to_local())


class _Alive(TorchDispatchMode):
    """Counts the bytes of memory that was made under it and is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if type(tensor) is torch.Tensor:
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._alive:
            self._alive[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._alive.values()))


def _check_memory(count: int) -> dict[bool, int]:
    model = nn.Sequential(*(nn.Linear(255, 257, bias=False) for _ in range(count)))
    fully_shard(model)
    peaks = {}
    for rank0_only in (False, True):
        with _Alive() as alive:
            for _, value in full_tensors(model, rank0_only=rank0_only):
                assert value.shape == (257, 255)
                del value
        peaks[rank0_only] = alive.peak
    return peaks


def test_one_full_value_is_in_memory_at_a_time() -> None:
    """Rows are uneven: what arrives is padded, and the value is a copy of it."""
    one = 255 * 257 * 4
    for peaks in run_ranks(_check_memory, 6):
        assert all(one < peak < 4 * one for peak in peaks.values())


def test_a_plain_model_gives_what_it_has() -> None:
    model = made()
    _assert_is_state_dict(dict(full_tensors(model, rank0_only=True)), model)


@on_ranks()
def test_inside_a_forward_it_is_refused() -> None:
    model = sharded()
    model.blocks[0].register_forward_hook(lambda *_: full_tensors(model))
    with pytest.raises(ConfigError, match=r"full_tensors\(\) in a forward"):
        model(batch())


@on_ranks(world_size=4)
def test_the_first_rank_must_be_that_of_all_meshes() -> None:
    parts: Any = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    mesh = mesh_of((2, 2))
    fully_shard(parts[0], mesh=mesh["shard"])
    fully_shard(parts[1], mesh=mesh)
    if dist.get_rank() >= 2:  # these two have other first ranks than the mesh of all
        with pytest.raises(ConfigError, match=r"whose first ranks are \[0, 2\]"):
            full_tensors(parts, rank0_only=True)
