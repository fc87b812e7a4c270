"""Parameters that are DTensors before they are sharded: layouts, whole values, checkpoints, and what is refused."""

from __future__ import annotations

import copy
import functools
import tempfile
import weakref
from collections.abc import Callable
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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fsdp_compile
from fsdp_compile import EMA, ConfigError, FSDPCompileError, UnsupportedModelError, fully_shard
from tests.models.tensor_parallel import VOCABULARY, Llama, split
from tests.ranks import run_ranks


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


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: _whole(parameter) for name, parameter in model.named_parameters()}


def _assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def _raised(call: Callable[[], object]) -> FSDPCompileError | None:
    try:
        call()
    except FSDPCompileError as error:
        return error
    return None


def _whole_values() -> None:
    reference, reference_optimizer = _trained(_plain())
    expected = {name: p.detach() for name, p in reference.named_parameters()}
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


def test_whole_values() -> None:
    run_ranks(_whole_values, world_size=4)


def _full_params() -> None:
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


def test_full_params_are_what_they_were_before() -> None:
    run_ranks(_full_params, world_size=4)


def _optimizer_inside() -> list[str]:
    """Names of parameters that an optimizer from inside of `full_params` does not train."""
    model = _sharded(_world())
    with fsdp_compile.full_params(model):
        optimizer = _adamw(model)
    before = _values(model)
    _step(model, optimizer)
    return [name for name, value in _values(model).items() if torch.equal(value, before[name])]


@pytest.mark.long
def test_an_optimizer_from_inside_of_full_params_trains_all() -> None:
    assert run_ranks(_optimizer_inside, world_size=4) == [[]] * 4


def _replaced_inside() -> list[str]:
    found = []
    for other in (
        torch.zeros(VOCABULARY, 16),
        distribute_tensor(torch.zeros(VOCABULARY, 16), _world()["tp"], [Shard(1)]),
    ):
        model = _sharded(_world())
        before = _values(model)

        def replace(model: Llama = model, other: torch.Tensor = other) -> None:
            with fsdp_compile.full_params(model):
                model.head.weight = nn.Parameter(other)

        found.append(str(_raised(replace)))
        _assert_close(_values(model), before)
        model(_batch()).backward()  # it is as it was
    return found


def test_other_layouts_inside_of_full_params_are_refused() -> None:
    for errors in run_ranks(_replaced_inside, world_size=4):
        for error in errors:
            assert "it was split in another way" in error
            assert "head.weight" in error


def _replaced_outside() -> list[str]:
    """Another layout in the place of a split parameter, and the same one, before the next forward."""
    world = _world()
    values = torch.ones(VOCABULARY, 16)
    found = []
    for placement in (Shard(1), Replicate()):
        model = _sharded(world)
        model.head.weight = nn.Parameter(distribute_tensor(values, world["tp"], [placement]))
        found.append(str(_raised(lambda model=model: model(_batch()))))  # type: ignore[misc]
    model = _sharded(world)
    model.head.weight = nn.Parameter(distribute_tensor(values, world["tp"], [Shard(0)]))
    model(_batch()).backward()
    assert torch.equal(_values(model)["head.weight"], values)
    model.head.weight = nn.Parameter(2 * values)
    model(_batch()).backward()
    assert torch.equal(_values(model)["head.weight"], 2 * values)
    elsewhere: Any = _OnAnotherMesh()
    call = functools.partial(fully_shard, split(_plain(), world["tp"]), mesh=world["dp"])
    error = _raised(lambda: call(shard_placement_fn=lambda _: elsewhere))
    return [*found, str(error)]


class _OnAnotherMesh:
    """As torch's `ShardPlacementResult`, which not every version has."""

    placement, mesh_info = Shard(0), None


@pytest.mark.long
def test_replaced_parameters_have_the_same_layout_or_are_refused() -> None:
    for *layouts, mesh in run_ranks(_replaced_outside, world_size=4):
        for error in layouts:
            assert "head.weight" in error
            assert "and was split with (Shard(dim=0),)" in error
        assert "ShardPlacementResult" in mesh


def _referred_to() -> list[str]:
    world = _world()
    model = split(_plain(), world["tp"])
    loss = model(_batch())
    found = [str(_raised(lambda: fully_shard(model, mesh=world["dp"])))]
    del loss
    kept = weakref.WeakKeyDictionary({model.head.weight: 1})
    found.append(str(_raised(lambda: fully_shard(model, mesh=world["dp"]))))
    assert not any(isinstance(p, DTensor) and p.device_mesh.ndim == 2 for p in model.parameters()), "changed"
    del kept
    fully_shard(model, mesh=world["dp"])
    model(_batch()).backward()
    return found


def test_parameters_that_cannot_change_are_refused() -> None:
    for graph, weak in run_ranks(_referred_to, world_size=4):
        assert "saved by a graph" in graph
        assert "a weak reference" in weak
        assert "head.weight" in weak


def _checkpoints(folder: str) -> None:
    model, optimizer = _trained(_sharded(_world(2, 2)))
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=folder)
    _step(model, optimizer)
    for shape in ((4, 1), (1, 4)):
        other = _sharded(_world(*shape), seed=1)
        other_optimizer = _adamw(other)
        into: dict[str, Any] = {
            "model": get_model_state_dict(other),
            "optimizer": get_optimizer_state_dict(other, other_optimizer),
        }
        dcp.load(into, checkpoint_id=folder)
        set_model_state_dict(other, into["model"])
        set_optimizer_state_dict(other, other_optimizer, into["optimizer"])
        _step(other, other_optimizer)
        _assert_close(_values(other), _values(model))


def test_checkpoints_are_loaded_over_other_meshes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_checkpoints, folder, world_size=4)


def _full_state_from_first() -> None:
    source, _ = _trained(_plain(seed=3))
    model = _sharded(_world())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    first = dist.get_rank() == 0
    set_model_state_dict(model, source.state_dict() if first else {}, options=options)
    _assert_close(_values(model), {name: p.detach() for name, p in source.named_parameters()})


def test_full_state_of_the_first_rank() -> None:
    run_ranks(_full_state_from_first, world_size=4)


def _other_steps() -> None:
    reference, _ = _trained(_plain())
    expected = {name: p.detach() for name, p in reference.named_parameters()}
    for wrap in (fsdp_compile.flat_step, fsdp_compile.whole_step, fsdp_compile.step_in_backward):
        model = _sharded(_world())
        optimizer = wrap(_adamw(model))
        for _ in range(2):
            _step(model, optimizer)
        _assert_close(_values(model), expected)


def test_other_steps() -> None:
    run_ranks(_other_steps, world_size=4)


def _average() -> None:
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
def test_average() -> None:
    run_ranks(_average, world_size=4)


def _changed_later() -> None:
    model = _sharded(_world())
    before = _values(model)
    model.bfloat16()
    model(_batch()).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
    model.float()
    model.requires_grad_(requires_grad=False)
    model.head.requires_grad_()
    model.zero_grad()
    model(_batch()).backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"head.weight"}
    _assert_close(_values(model), {name: value.bfloat16().float() for name, value in before.items()})


@pytest.mark.long
def test_dtypes_and_frozen_parameters() -> None:
    run_ranks(_changed_later, world_size=4)


def _on_meta() -> None:
    world = _world()
    expected: dict[str, Any] = _values(_sharded(world))
    with torch.device("meta"):
        model = Llama(layers=1, hidden=12)
    split(model, world["tp"])
    for module in (*model.layers, model):
        fully_shard(module, mesh=world["dp"])
    error = _raised(lambda: fsdp_compile.materialize(model))
    assert isinstance(error, UnsupportedModelError)
    assert "to_empty" in str(error)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(expected) if dist.get_rank() == 0 else {}, options=options)
    model(_batch()).backward()
    _assert_close(_values(model), expected)


def test_a_model_on_meta() -> None:
    run_ranks(_on_meta, world_size=4)


def _first_ranks_values() -> None:
    world = _world()
    # Ranks that are replicas of a part start with other values; those of one model have the same.
    model = _sharded(world, seed=world["dp"].get_local_rank(), sync_module_states=True)
    _assert_close(_values(model), {name: p.detach() for name, p in _plain(0).named_parameters()})


def test_first_ranks_values() -> None:
    run_ranks(_first_ranks_values, world_size=4)


def _different_values() -> str:
    world = _world()
    model = _sharded(world, seed=world["dp"].get_local_rank())
    return str(_raised(lambda: model(_batch())))


def test_values_that_differ_are_refused() -> None:
    for error in run_ranks(_different_values, world_size=4):
        assert "ranks start with different values of a parameter" in error


def _compiled_alone() -> list[str]:
    """A tensor-parallel model that is not sharded, and is compiled; what other calls say of wrong meshes."""
    world = _world()
    found = []
    torch.manual_seed(0)
    model = split(_plain(), world["tp"])
    compiled = torch.compile(copy.deepcopy(model), backend="fsdp", options={"lower": "eager"})
    found.append(str(_raised(lambda: compiled(_batch()))))
    others = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (4,), mesh_dim_names=("x",))]
    for mesh in (None, world["tp"], *others):
        error = _raised(functools.partial(fully_shard, split(_plain(), world["tp"]), mesh=mesh))
        assert isinstance(error, ConfigError), mesh
        found.append(str(error))
    return found


def test_wrong_meshes_are_refused() -> None:
    for first, *others in run_ranks(_compiled_alone, world_size=4):
        assert 'fully_shard(model, mesh=mesh["dp"])' in first
        for error in others:
            assert "not different dimensions of one mesh" in error
            assert "embedding.weight" in error


def _taken_over(lower: str | None) -> list[str]:
    """Two steps of FSDP2 and two here, beside four of FSDP2; names of what differs."""
    found: list[dict[str, Any]] = []
    for others in (0, 2):
        world = _world()
        model: nn.Module = split(_plain(), world["tp"])
        for module in (*model.layers, model):  # type: ignore[misc]
            torch.distributed.fsdp.fully_shard(module, mesh=world["dp"])
        optimizer = _adamw(model)
        for _ in range(4 - others):
            _step(model, optimizer)
        call: Any = model
        if others and lower is None:
            fully_shard(model)
        elif others:
            call = torch.compile(model, backend="fsdp", options={"lower": str(lower)})
        for _ in range(others):
            optimizer.zero_grad()
            call(_batch()).backward()
            optimizer.step()
        parameters: dict[str, Any] = dict(model.named_parameters())
        found.append({name: (p.placements, p.to_local()) for name, p in parameters.items()})
    theirs, ours = found
    return [n for n in theirs if theirs[n][0] != ours[n][0] or not torch.equal(theirs[n][1], ours[n][1])]


@pytest.mark.parametrize("lower", [None, pytest.param("eager", marks=pytest.mark.long)])
def test_a_model_of_fsdp2_is_taken_over(lower: str | None) -> None:
    assert run_ranks(_taken_over, lower, world_size=4) == [[]] * 4


def _odd_placements() -> list[str]:
    world = _world()
    found = []
    for value in (
        DTensor.from_local(torch.ones(4, 4), world["tp"], [Partial()]),
        distribute_tensor(torch.ones(4, 4), world["tp"], [Shard(0)]).t(),
    ):
        module = nn.Linear(4, 4, bias=False)
        module.weight = nn.Parameter(value)
        error = _raised(functools.partial(fully_shard, module, mesh=world["dp"]))
        assert isinstance(error, UnsupportedModelError)
        found.append(str(error))
    return found


def test_odd_placements_are_refused() -> None:
    for partial, transposed in run_ranks(_odd_placements, world_size=4):
        assert "a sum that was not made yet" in partial
        assert "not contiguous" in transposed


def _by_hand() -> None:
    """Replicated parameters, and one that a user has split by hand."""
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
        torch.testing.assert_close(_whole(found.grad), expected.grad)  # type: ignore[arg-type]
    expected_norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(fsdp_compile.clip_grad_norm_(model, 1e9), expected_norm)


def _values_in_place(lower: str | None) -> str:
    """Values that take the parameters' place in one call: DTensors as before, or a plain tensor."""
    world = _world()
    model = _sharded(world)
    other = split(_plain(seed=5), world["tp"])
    expected = other(_batch()).detach()
    call: Any = model if lower is None else torch.compile(model, backend="fsdp", options={"lower": lower})
    before = call(_batch()).detach()
    given = {name: p.detach() for name, p in other.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(model, given, (_batch(),)), expected)
    assert torch.equal(call(_batch()).detach(), before)
    whole = {"head.weight": torch.zeros(VOCABULARY, 16)}
    try:
        torch.func.functional_call(model, whole, (_batch(),))
    except (RuntimeError, FSDPCompileError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("lower", [None, pytest.param("eager", marks=pytest.mark.long)])
def test_values_in_the_place_of_parameters(lower: str | None) -> None:
    for error in run_ranks(_values_in_place, lower, world_size=4):
        assert "in a model that tensor parallelism has split" in error


def test_parameters_that_were_split_by_hand() -> None:
    run_ranks(_by_hand, world_size=4)
