"""State dicts: the same keys and values, the parameters' own memory, and every way to save, copy and load them."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    _patch_model_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard
from fsdp_compile.fsdp2.shards import local_of
from tests.models.outlines import Odd
from tests.ranks import run_ranks
from tests.two_sides import Run, compile_eagerly


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
