"""`device_id`: checked before anything is sharded; what is on the CPU goes there."""

from __future__ import annotations

import types
import warnings
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile import ConfigError, FSDPOptions, fully_shard, materialize
from fsdp_compile.sharding import devices
from tests.models.meta import Tied, init_normal
from tests.ranks import run_ranks
from tests.sharding.test_materialize import full_state, on_meta

META = torch.device("meta")
"""Stands for another device: every machine has it."""


class Buffers(nn.Module):
    """Two modules hold one buffer; another module is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other = nn.Module(), nn.Module(), nn.Module()
        table = torch.ones(3)
        self.first.register_buffer("table", table)
        self.second.register_buffer("table", table)
        self.second.register_buffer("none", None)
        self.other.register_buffer("table", torch.ones(3))


def test_buffers_are_moved_once_and_ignored_ones_stay() -> None:
    model = Buffers()
    devices.move_buffers(model, META, [model.other])
    assert model.first.table is model.second.table
    assert model.first.table.device == META
    assert model.other.table.device == torch.device("cpu")


def test_mixtures_are_refused_unless_the_cpu_part_moves() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device=META))
    devices.refuse_mixture(model, (), None)
    devices.refuse_mixture(model, (), torch.device("cuda", 1))
    elsewhere = _Elsewhere()
    with pytest.raises(ConfigError, match=r"several devices: 0\.weight on cpu, 1\.weight on cuda:1"):
        devices.refuse_mixture(elsewhere, (), None)
    devices.refuse_mixture(elsewhere, (), torch.device("cuda", 1))
    with pytest.raises(ConfigError, match=r"0\.weight on cuda:0, 1\.weight on cuda:1"):
        devices.refuse_mixture(elsewhere, (), torch.device("cuda", 0))
    on_cpu = {id(p) for name, p in elsewhere.named_parameters() if name == "0.weight"}
    devices.refuse_mixture(elsewhere, on_cpu, None)
    with pytest.raises(ConfigError, match="parameters lie on cuda:1, and device_id is cuda:0"):
        devices.refuse_mixture(elsewhere, on_cpu, torch.device("cuda", 0))


class _Elsewhere(nn.Module):
    """Says that it has one parameter on the CPU and one on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.said = [_parameter(torch.device("cpu")), _parameter(torch.device("cuda", 1))]

    def named_parameters(self, *_args: Any, **_kwargs: Any) -> Any:
        return [(f"{i}.weight", p) for i, p in enumerate(self.said)]


def _parameter(device: torch.device) -> Any:
    return types.SimpleNamespace(device=device, is_meta=False)


def test_a_device_without_index_is_the_current_one_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    mesh = cast("DeviceMesh", types.SimpleNamespace(device_type="cuda"))
    with pytest.warns(UserWarning, match="no index: this rank takes its current device, cuda:1"):
        assert devices.chosen(mesh, "cuda") == torch.device("cuda", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert devices.chosen(mesh, 0) == torch.device("cuda", 0)
        assert devices.chosen(mesh, torch.device("cuda", 1)) == torch.device("cuda", 1)
        assert devices.chosen(mesh, None) is None
    with pytest.raises(ConfigError, match="device 2 does not exist"):
        devices.chosen(mesh, 2)


def test_the_kind_of_a_mesh_is_that_of_the_device() -> None:
    assert devices.kind_of(nn.Linear(1, 1), "cuda") == "cuda"
    assert devices.kind_of(nn.Linear(1, 1), None) == "cpu"


def _check_on_the_cpu() -> None:
    model = nn.Linear(4, 4)
    expected = model.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fully_shard(model, device_id="cpu")
    assert torch.equal(full_state(model)["weight"], expected)
    made = fully_shard(on_meta(Tied), device_id=torch.device("cpu"), param_init_fn=init_normal)
    assert all(t.device.type == "cpu" for t in full_state(made).values())
    for wrong, what in ((1.5, "is no device"), ("cuda:0", "not one of the mesh"), (0, "not one of the mesh")):
        other = nn.Linear(4, 4)
        with pytest.raises(ConfigError, match=what):
            fully_shard(other, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)), device_id=wrong)  # type: ignore[arg-type]
        assert isinstance(other.weight, nn.Parameter)
        assert other.weight.shape == (4, 4)


@pytest.mark.core
def test_device_id_on_the_cpu() -> None:
    run_ranks(_check_on_the_cpu, world_size=1)


def _check_on_gpus() -> None:
    dist.destroy_process_group()
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29677", rank=0, world_size=1)
    model, reference = Tied(), Tied()
    reference.load_state_dict(model.state_dict())
    fully_shard(model, device_id=0, sync_module_states=True)
    for name, value in full_state(model).items():
        assert value.device == torch.device("cuda", 0), name
        assert torch.equal(value.cpu(), full_state(reference)[name]), name
    made = fully_shard(on_meta(Tied), device_id=0)
    materialize(made, device=0)
    assert all(t.is_cuda for t in full_state(made).values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_on_the_cpu_goes_to_the_gpu() -> None:
    run_ranks(_check_on_gpus, world_size=1)


@pytest.mark.parametrize("name", ["param_init_fn", "device_id"])
def test_what_comes_too_late_in_a_compile_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FSDPOptions.from_dict({name: None})
    assert caught.value.instead == f"fully_shard(model, {name}=...) before torch.compile"
