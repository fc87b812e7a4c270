"""State dicts: the same keys and values, the parameters' own memory, and every way to save, copy and load them."""

from __future__ import annotations

import copy
import io
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
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard
from fsdp_compile.fsdp2.shards import local_of
from tests.models.outlines import Odd, Transformer
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import Run, WithOneProcess, adamw, compile_eagerly


def _pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Odd()
    reference = copy.deepcopy(model)
    return fully_shard(model), reference


def _full(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def _assert_equal(state: dict[str, Any], reference: nn.Module) -> None:
    full, expected = _full(state), reference.state_dict()
    assert list(full) == list(expected)
    for name, value in expected.items():
        assert torch.equal(full[name], value), name


def _check_saving(how: Run) -> None:
    """torch.save, deep copies and pickles of a state dict; values share memory with the parameters."""
    model, reference = _pair()
    if how is Run.SHARDED:
        compile_eagerly(model)(torch.ones(3, 10))
    state = model.state_dict()
    assert all(isinstance(value, DTensor) == bool(value.dim() and value.numel()) for value in state.values())
    _assert_equal(state, reference)
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
        _assert_equal(kept, reference)
    model.load_state_dict(saved)
    _assert_equal(model.state_dict(), reference)
    assert model.state_dict(keep_vars=True)["uneven.weight"] is model.get_parameter("uneven.weight")


@pytest.mark.core
def test_a_state_dict_can_be_saved_copied_and_loaded() -> None:
    for how in (Run.EAGER, Run.SHARDED):
        run_ranks(_check_saving, how, world_size=4)


@on_ranks()
def test_full_state_dicts_through_torchs_own_functions() -> None:
    model, reference = _pair()
    options = StateDictOptions(full_state_dict=True)
    _assert_equal(get_model_state_dict(model, options=options), reference)
    other = Odd()
    set_model_state_dict(model, other.state_dict(), options=options)
    _assert_equal(model.state_dict(), other)
    x = torch.randn(3, 10)
    torch.testing.assert_close(model(x), other(x))


def _check_patched(folder: str) -> None:
    """`_patch_model_state_dict`, after which `torch.distributed.checkpoint` takes the model itself."""
    model, reference = _pair()
    compile_eagerly(model)(torch.ones(3, 10))
    _patch_model_state_dict(model)
    dcp.save({"model": model}, checkpoint_id=folder)
    with torch.no_grad():
        model.get_parameter("uneven.weight").zero_()
    dcp.load({"model": model}, checkpoint_id=folder)
    _assert_equal(model.state_dict(), reference)
    model.load_state_dict(model.state_dict())


def test_methods_that_torch_has_replaced(tmp_path: Path) -> None:
    run_ranks(_check_patched, str(tmp_path))


def _check_distributed_checkpoint(folder: str) -> None:
    model, reference = _pair()
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    other = fully_shard(Odd())
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    _assert_equal(other.state_dict(), reference)
    x = torch.randn(3, 10)
    assert torch.equal(other(x), model(x))


@pytest.mark.long
@pytest.mark.core
def test_distributed_checkpoints(tmp_path: Path) -> None:
    """Saved by four ranks, loaded by four and then by two."""
    run_ranks(_check_distributed_checkpoint, str(tmp_path), world_size=4)
    run_ranks(_check_resharding, str(tmp_path), world_size=2)


def _check_resharding(folder: str) -> None:
    _, reference = _pair()
    model = fully_shard(Odd())
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    _assert_equal(model.state_dict(), reference)


class _WithBuffer(Transformer):
    """Holds a buffer and extra state, which stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def get_extra_state(self) -> str:
        return "extra"

    def set_extra_state(self, state: Any) -> None:
        assert state == "extra"


@on_ranks()
def test_buffers_and_extra_state() -> None:
    model = fully_shard(_WithBuffer())
    state = model.state_dict()
    assert list(state) == list(_WithBuffer().state_dict())
    assert state["_extra_state"] == "extra"
    assert type(state["count"]) is torch.Tensor
    assert isinstance(state["blocks.2.up.bias"], DTensor)
    torch.save(state, io.BytesIO())
    with torch.device("meta"):
        empty = fully_shard(_WithBuffer())
    assert {v.device.type for v in empty.state_dict().values() if isinstance(v, torch.Tensor)} == {"meta"}


@on_ranks()
def test_the_state_of_an_optimizer_can_be_saved() -> None:
    pair = WithOneProcess(Transformer, Run.EAGER, optimizer=adamw)
    model, optimizer = pair.model, pair.optimizers[0][0]
    tokens = torch.arange(8).reshape(2, 4)
    model(tokens).square().mean().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert len(again["state"]) == len(list(model.parameters()))
    local = [value["exp_avg"].to_local() for value in again["state"].values()]
    held = [optimizer.state[p]["exp_avg"].to_local() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(local, held, strict=True))
    assert dist.get_world_size() == 2


class _ByName(nn.Module):
    """Reads a parameter of a child by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.block = nn.Sequential(nn.Linear(6, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x) @ self.get_parameter("block.0.weight"))


@pytest.mark.long
@on_ranks()
def test_get_parameter_in_a_forward_that_is_traced_when_there_are_gradients() -> None:
    both = WithOneProcess(_ByName, Run.SHARDED)
    both.backward()
    both.change(lambda model: model.zero_grad(set_to_none=False))
    both.change(lambda model: model.get_submodule("first").requires_grad_(requires_grad=False))
    both.backward()  # traces again: parameters have gradients
    both.compare()
