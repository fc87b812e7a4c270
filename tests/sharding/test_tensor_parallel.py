"""Parameters over several meshes or dimensions: whole values, gradients, checkpoints, optimizers, averages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp_compile
from fsdp_compile import EMA, ConfigError, fully_shard
from tests.models.spmd import WIDTH, Spmd
from tests.models.tensor_parallel import VOCABULARY, Llama, split
from tests.ranks import on_ranks
from tests.two_sides import close, compile_eagerly, whole


def _world(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape or (2, 2), mesh_dim_names=("dp", "tp"))


def _plain(seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    return Llama(layers=1, hidden=12)


def _sharded(world: DeviceMesh, seed: int = 0, **arguments: object) -> Llama:
    model = split(_plain(seed), world["tp"])
    for module in (*model.layers, model):
        fully_shard(module, mesh=world["dp"], **arguments)  # type: ignore[arg-type]
    return model


def _batch() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(7))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(_batch()).backward()
    optimizer.step()


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def _trained(model: nn.Module, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = _adamw(model)
    for _ in range(steps):
        _step(model, optimizer)
    return model, optimizer


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}


def _assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor] | nn.Module) -> None:
    expected = _values(expected) if isinstance(expected, nn.Module) else expected
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        close(found[name], value, name, (1e-4, 1e-5))


@on_ranks(world_size=4)
def test_whole_values() -> None:
    reference, reference_optimizer = _trained(_plain())
    expected = _values(reference)
    model, optimizer = _trained(_sharded(_world()))
    _assert_close(_values(model), expected)
    _assert_close(dict(fsdp_compile.full_tensors(model)), expected)
    first = dict(fsdp_compile.full_tensors(model, rank0_only=True))
    assert bool(first) is (dist.get_rank() == 0)
    if first:
        _assert_close(first, expected)
    _assert_close(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), expected)  # type: ignore[arg-type]
    state = fsdp_compile.optim_state_dict(model, optimizer)["state"]
    names = [name for name, _ in reference.named_parameters()]
    moments = {names[i]: value["exp_avg"] for i, value in reference_optimizer.state_dict()["state"].items()}
    _assert_close({name: value["exp_avg"] for name, value in state.items()}, moments)
    loaded = fsdp_compile.optim_state_dict_to_load(model, optimizer, {"state": state})
    assert loaded["state"]


@pytest.mark.long
@on_ranks(world_size=4)
def test_full_params_are_what_they_were_before() -> None:
    model = _sharded(_world())
    before = _values(model)
    with fsdp_compile.full_params(model):
        weight = model.get_parameter("layers.0.feed_forward.up.weight")
        assert isinstance(weight, DTensor)
        assert weight.device_mesh.mesh_dim_names == ("tp",)
        assert weight.placements == (Shard(0),)
        loss = model(_batch())  # the plain model's, over the tensor-parallel mesh
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
    torch.testing.assert_close(loss.detach(), _plain()(_batch()).detach())
    _assert_close(_values(model), {name: 2 * value for name, value in before.items()})


@pytest.mark.long
@on_ranks(world_size=4)
def test_checkpoints_are_loaded_over_other_meshes(tmp_path: Path) -> None:
    model, optimizer = _trained(_sharded(_world(2, 2)))
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path)
    _step(model, optimizer)
    for shape in ((4, 1), (1, 4)):
        other = _sharded(_world(*shape), seed=1)
        other_optimizer = _adamw(other)
        into: dict[str, Any] = {
            "model": get_model_state_dict(other),
            "optimizer": get_optimizer_state_dict(other, other_optimizer),
        }
        dcp.load(into, checkpoint_id=tmp_path)
        set_model_state_dict(other, into["model"])
        set_optimizer_state_dict(other, other_optimizer, into["optimizer"])
        _step(other, other_optimizer)
        _assert_close(_values(other), model)


@pytest.mark.long
@on_ranks(world_size=4)
def test_full_state_of_the_first_rank() -> None:
    source, _ = _trained(_plain(seed=3))
    model = _sharded(_world())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    first = dist.get_rank() == 0
    set_model_state_dict(model, source.state_dict() if first else {}, options=options)
    _assert_close(_values(model), source)


@pytest.mark.long
@on_ranks(world_size=4)
def test_other_steps() -> None:
    reference, _ = _trained(_plain())
    expected = _values(reference)
    for wrap in (fsdp_compile.flat_step, fsdp_compile.whole_step, fsdp_compile.step_in_backward):
        model = _sharded(_world())
        optimizer = wrap(_adamw(model))
        for _ in range(2):
            _step(model, optimizer)
        _assert_close(_values(model), expected)


@pytest.mark.long
@on_ranks(world_size=4)
def test_average() -> None:
    model = _sharded(_world())
    ema = EMA(model, decay=0.5)
    ema.update()
    before = _values(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    ema.update()
    full = ema.full_state_dict()
    expected = {f"module.{name}": 2 * value for name, value in before.items()}
    _assert_close({name: full[name] for name in expected}, expected)
    again = EMA(model, decay=0.5)
    again.load_state_dict(full)
    with again.swapped_in():
        _assert_close(_values(model), {name: 2 * value for name, value in before.items()})


@pytest.mark.long
@on_ranks(world_size=4)
def test_dtypes_and_frozen_parameters() -> None:
    model = _sharded(_world())
    before = _values(model)
    call: Any = compile_eagerly(model)
    model.bfloat16()
    call(_batch()).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
    model.float()
    model.requires_grad_(requires_grad=False)
    model.head.requires_grad_()
    model.zero_grad()
    call(_batch()).backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"head.weight"}
    _assert_close(_values(model), {name: value.bfloat16().float() for name, value in before.items()})


@pytest.mark.long
@on_ranks(world_size=4)
def test_a_model_on_meta() -> None:
    world = _world()
    expected: dict[str, Any] = _values(_sharded(world))
    with torch.device("meta"):
        model = Llama(layers=1, hidden=12)
    split(model, world["tp"])
    for module in (*model.layers, model):
        fully_shard(module, mesh=world["dp"])
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(expected) if dist.get_rank() == 0 else {}, options=options)
    model(_batch()).backward()
    _assert_close(_values(model), expected)


@pytest.mark.long
@on_ranks(world_size=4)
def test_first_ranks_values() -> None:
    world = _world()
    # Ranks that are replicas of a part start with other values; those of one model have the same.
    model = _sharded(world, seed=world["dp"].get_local_rank(), sync_module_states=True)
    _assert_close(_values(model), _plain(0))


@pytest.mark.long
@on_ranks(world_size=4)
def test_parameters_that_were_split_by_hand() -> None:
    world = _world()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    model = copy.deepcopy(plain)
    for module in (model[0], model[2]):
        for name, value in list(module.named_parameters()):
            placements = [Shard(1)] if name == "weight" else [Replicate()]
            setattr(module, name, nn.Parameter(distribute_tensor(value.detach(), world["tp"], placements)))
    fully_shard(model, mesh=world["dp"])
    x = torch.randn(4, 8)
    given = distribute_tensor(x, world["tp"], [Replicate()])
    plain(x).square().mean().backward()
    model(given).full_tensor().square().mean().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(found.grad), expected.grad)
    expected_norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(fsdp_compile.clip_grad_norm_(model, 1e9), expected_norm)


# Meshes that a call names by dimensions, or parameter by parameter.

Dims: Any = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)
Result: Any = getattr(_fsdp_common, "ShardPlacementResult", None)
needs_dims = pytest.mark.skipif(Dims is None, reason="torch has no DataParallelMeshDims")
needs_result = pytest.mark.skipif(Result is None, reason="torch has no ShardPlacementResult")


@needs_dims
@on_ranks(world_size=4)
def test_whole_values_and_norms_of_a_model_over_a_whole_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    torch.manual_seed(0)
    plain = Spmd(1)
    torch.manual_seed(0)
    model = Spmd(1).spread(mesh, "tp", ("data",))
    fully_shard(model, mesh=mesh, dp_mesh_dims=Dims("data"))
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    for found in (
        {name: p.full_tensor() for name, p in model.named_parameters() if isinstance(p, DTensor)},
        dict(fsdp_compile.full_tensors(model)),
    ):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    plain(x).square().mean().backward()
    out: Any = model(x.chunk(2)[mesh.get_local_rank("data")])
    out.to_local().square().mean().backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(fsdp_compile.clip_grad_norm_(model, 1e9), norm)
    with fsdp_compile.full_params(model):
        weight = model.get_parameter("layers.0.up.weight")
        assert isinstance(weight, DTensor)
        assert weight.placements == (Replicate(), Shard(0))
        with torch.no_grad():
            weight.mul_(2)
    held: Any = model.get_parameter("layers.0.up.weight")
    assert torch.equal(held.full_tensor(), 2 * expected["layers.0.up.weight"])


class _Positioned(nn.Module):
    """A parameter of no dimensions, and one of which each rank of "cp" uses some rows."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.position, self.weight = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.scale = nn.Parameter(torch.tensor(1.5))
        if mesh is not None:
            for name, value in list(self.named_parameters()):
                whole = distribute_tensor(value.detach(), mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
                setattr(self, name, nn.Parameter(whole))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.position) * self.weight * self.scale


@needs_dims
@on_ranks(world_size=4)
def test_a_gradient_that_is_split_over_a_data_parallel_dimension() -> None:
    """Batches are split over "dp", sequences over "cp"; FSDP2 takes the split gradient for one with partial sums."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    reference, model = _Positioned(), _Positioned(mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(("dp", "cp")))
    call: Any = compile_eagerly(model)
    batch = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(5))
    reference(batch).square().mean().backward()
    own = batch.chunk(2)[mesh.get_local_rank("dp")].chunk(2, dim=1)[mesh.get_local_rank("cp")].contiguous()
    call(DTensor.from_local(own, mesh, [Shard(0), Shard(1)])).to_local().square().mean().backward()
    for name, parameter in reference.named_parameters():
        mine: Any = model.get_parameter(name).grad
        torch.testing.assert_close(mine.full_tensor(), parameter.grad, msg=name)


class _Two(nn.Module):
    """Parameters of one module that belong to two meshes."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.dense(x)) * self.scale


@needs_result
@on_ranks(world_size=4)
def test_parameters_of_one_module_on_two_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    every = init_device_mesh("cpu", (4,), mesh_dim_names=("every",))
    info = _fsdp_common.FSDPMeshInfo(mesh["dp"], shard_mesh_dim=0)

    def fn(model: _Two) -> Callable[[nn.Parameter], Any]:
        # The expert of each rank of "ep", and the scale, which has no dimension, are its own.
        return lambda p: Result(None, info) if p is model.expert.weight or p is model.scale else None

    torch.manual_seed(0)
    model = _Two()
    own = mesh.get_local_rank("ep")
    with torch.no_grad():
        model.expert.weight.mul_(own + 1)  # other values on ranks that have another expert
        model.scale.add_(own)
    fully_shard(model, mesh=every, shard_placement_fn=fn(model))
    parent = nn.Sequential(model)  # a call above it makes of the split one unit for each mesh
    fully_shard(parent, mesh=every)
    units = sorted(
        (name, parameter.device_mesh.size())
        for name, parameter in parent.named_parameters()
        if isinstance(parameter, DTensor)
    )
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    parent(x).sum().backward()
    assert model.scale.grad is not None
    values = [torch.zeros(()) for _ in range(4)]
    dist.all_gather(values, model.scale.grad)
    units, scales = [units, [v.item() for v in values]]
    assert units == [("0.dense.bias", 4), ("0.dense.weight", 4), ("0.expert.weight", 2)]
    assert scales[0] == scales[2] != scales[1] == scales[3]  # averaged over "dp" alone


def test_a_strategy_and_dimensions_say_the_same_twice(fake_world: Callable[..., Any]) -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
        both: list[dict[str, Any]] = [{"mesh": mesh, "sharding_strategy": ShardingStrategy.FULL_SHARD}, {}]
        for given in both:
            with pytest.raises(ConfigError, match="a mesh with it, and no sharding_strategy"):
                fully_shard(nn.Linear(4, 4), dp_mesh_dims=Dims("data") if Dims else "data", **given)
