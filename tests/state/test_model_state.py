"""A sharded model's own `state_dict()` and `load_state_dict()`: names, values, memory, collectives, copies."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _patch_model_state_dict,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_compile import full_tensors, fully_shard, materialize, optim_state_dict
from fsdp_compile.fsdp2.shards import local_of
from tests.fsdp2.models import assert_same, batch, made, mesh_of, sharded, train
from tests.models.meta import on_meta
from tests.models.outlines import MixedKinds, Odd
from tests.ranks import on_ranks
from tests.two_sides import Run, compile_eagerly, whole

State = dict[str, Any]


class _Kinds(MixedKinds):
    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Parameter(torch.randn(3, 2))
        self.ignored = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.ignored


def _kinds() -> Any:
    torch.manual_seed(0)
    return _Kinds()


def _sharded_kinds() -> Any:
    model = _kinds()
    return fully_shard(model, ignored_params=[model.ignored])


BY_TORCH, BY_US = (made, sharded), (_kinds, _sharded_kinds)
"""Sharded by torch's calls, block by block; and by ours, of more kinds of parameters, with a layer of bfloat16."""
Makes = tuple[Callable[[], Any], Callable[[], Any]]
WHOLE = ("scale", "ignored")
"""Parameters that are not sharded."""


def _values(model: nn.Module) -> State:
    return {name: value.clone() for name, value in full_tensors(model)}


def _raised(state: State) -> State:
    """A copy in which all floating-point values are larger by one."""
    return {name: copy.deepcopy(value) + value.is_floating_point() for name, value in state.items()}


@pytest.mark.parametrize("makes", [BY_TORCH, BY_US], ids=["net", "kinds"])
@on_ranks()
def test_names_are_the_plain_models_with_and_without_compile(makes: Makes) -> None:
    plain, model = (make() for make in makes)
    compiled: Any = compile_eagerly(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if makes == BY_US or p is not model.scale])
    train(compiled, optimizer)
    expected = list(plain.state_dict())
    assert list(model.state_dict()) == expected
    assert {"last.weight", "tied.weight"} & set(expected)
    assert not {"table", "scratch"} & set(expected)
    assert [name for name, _ in full_tensors(compiled)] == expected
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        found = get_model_state_dict(compiled, options=options)
        assert set(found) == set(expected)
        set_model_state_dict(compiled, found, options=options)
    names = [list(optim_state_dict(each, optimizer)["state"]) for each in (model, compiled)]
    assert names[0] == names[1]
    assert set(names[0]) < {name for name, _ in plain.named_parameters()}
    # DCP's are in the optimizer's order.
    assert set(get_optimizer_state_dict(compiled, optimizer)["state"]) == set(names[0])
    set_model_state_dict(compiled, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
    assert_same(_values(compiled), plain.state_dict())


@pytest.mark.parametrize("makes", [BY_TORCH, BY_US], ids=["net", "kinds"])
@on_ranks()
def test_shards_are_saved_and_loaded_without_communication_whatever_is_gathered(makes: Makes) -> None:
    make, make_sharded = makes
    model = make_sharded()
    expected = _values(model)
    for _ in range(2):
        with CommDebugMode() as mode:
            state = model.state_dict()
        assert mode.get_total_counts() == 0
        parameters = dict(nn.Module.named_parameters(model, remove_duplicate=False))
        for name, value in state.items():
            assert isinstance(value, DTensor) == (name in parameters and name not in WHOLE), name
            assert torch.equal(whole(value), expected[name]), name
        model.unshard()
    # What is gathered meanwhile is not what the next forward reads.
    model.eval()
    reference = make().eval()
    raised = _raised(reference.state_dict())
    with CommDebugMode() as mode:
        model.load_state_dict(_raised(state))
    assert mode.get_total_counts() == 0
    reference.load_state_dict(raised)
    rtol, atol = (2e-2, 2e-2) if makes == BY_US else (1.3e-6, 1e-5)
    torch.testing.assert_close(model(batch()), reference(batch()), rtol=rtol, atol=atol)


def _pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Odd()
    reference = copy.deepcopy(model)
    return fully_shard(model), reference


@pytest.mark.core
@pytest.mark.parametrize("how", [Run.EAGER, Run.SHARDED])
@on_ranks(world_size=4)
def test_a_state_dict_can_be_saved_copied_and_loaded(how: Run) -> None:
    """torch.save, deep copies and pickles of a state dict; values share memory with the parameters."""
    model, reference = _pair()
    if how is Run.SHARDED:
        compile_eagerly(model)(torch.ones(3, 10))
    state = model.state_dict()
    assert all(isinstance(value, DTensor) == bool(value.dim() and value.numel()) for value in state.values())
    assert_same(state, reference.state_dict())
    file = io.BytesIO()
    torch.save(state, file)
    held = sum(local_of(value).nbytes for value in state.values())
    assert file.tell() < held + 2000 * len(state), "only what this rank holds of the parameters"
    saved = copy.deepcopy(state)
    with torch.no_grad():
        model.get_parameter("uneven.weight").zero_()
    assert not state["uneven.weight"].to_local().any()
    one = io.BytesIO()
    torch.save({"bias": state["uneven.bias"]}, one)
    assert one.tell() < local_of(state["uneven.bias"]).nbytes + 3500, "nothing of other parameters"
    file.seek(0)
    for kept in (saved, torch.load(file, weights_only=False)):
        assert_same(kept, reference.state_dict())
    model.load_state_dict(saved)
    assert_same(model.state_dict(), reference.state_dict())
    assert model.state_dict(keep_vars=True)["uneven.weight"] is model.get_parameter("uneven.weight")


@on_ranks()
def test_methods_that_torch_has_replaced(tmp_path: Path) -> None:
    """`_patch_model_state_dict`, after which `torch.distributed.checkpoint` takes the model itself."""
    model, reference = _pair()
    compile_eagerly(model)(torch.ones(3, 10))
    _patch_model_state_dict(model)
    dcp.save({"model": model}, checkpoint_id=tmp_path)
    with torch.no_grad():
        model.get_parameter("uneven.weight").zero_()
    dcp.load({"model": model}, checkpoint_id=tmp_path)
    assert_same(model.state_dict(), reference.state_dict())
    model.load_state_dict(model.state_dict())


def _tied() -> Any:
    """Uneven rows, a tied weight, buffers, one of them not saved."""
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 5, bias=False))
    model[3].weight = model[2].weight
    model[2].register_buffer("table", torch.ones(2, device=model[2].weight.device), persistent=False)
    return model


def _fill_table(module: Any) -> None:
    if hasattr(module, "table"):
        module.table.fill_(1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("mesh", "meta"), [((2,), False), ((2,), True), ((2, 2), True)])
@on_ranks(world_size=lambda mesh, **_: torch.Size(mesh).numel())
def test_torch_sends_the_state_dict_of_rank_0(mesh: tuple[int, ...], *, meta: bool, compiled: bool) -> None:
    state = copy.deepcopy(_tied().state_dict())
    model: Any = fully_shard(on_meta(_tied) if meta else _tied(), mesh=mesh_of(mesh))
    given = dict(state) if dist.get_rank() == 0 else {}  # torch replaces its values
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    called = compile_eagerly(model) if compiled else model
    set_model_state_dict(called, given, options=options)
    assert called.eval()(torch.ones(4, 3)).isfinite().all()
    assert model[3].weight is model[2].weight, "as FSDP2 ties what torch has assigned one by one"
    if meta:
        materialize(model, param_init_fn=_fill_table)
    assert_same(_values(model), state)
