"""Checkpoints of every format to read: the same values in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

from fsdp_compile import fully_shard
from tests.models.outlines import MixedKinds
from tests.ranks import run_ranks
from tests.training.small_run import SmallRun


def state() -> dict[str, torch.Tensor]:
    """Odd shapes, dtypes and values; `tied` is the memory of `weight`."""
    torch.manual_seed(0)
    weight = torch.randn(7, 6)
    complex_numbers = torch.randn(6, dtype=torch.complex64)
    return {
        "weight": weight,
        "tied": weight,
        "number": torch.tensor(1.5),
        "narrow": torch.randn(5, 7).bfloat16(),
        "half": torch.randn(3).half(),
        "tiny": torch.randn(4).to(torch.float8_e4m3fn),
        "wide": torch.randn(3, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "empty integers": torch.empty(0, dtype=torch.long),
        "count": torch.tensor(3),
        "mask": torch.tensor([True, False, True]),
        "odd": torch.tensor([-0.0, float("nan"), float("inf"), 1e-45]),
        "turned": torch.randn(6, 4).t(),
        "a.b": torch.randn(2, 3, 4, dtype=torch.complex64),
        "complex": complex_numbers,
        "conjugated": complex_numbers.conj(),  # of that memory
        "turned and conjugated": torch.randn(4, 3, dtype=torch.complex64).t().conj(),
        "negated": torch.randn(5, dtype=torch.complex64).conj().imag,
    }


def assert_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The same names and, bit for bit, the same values, in nested dictionaries and lists."""
    assert list(mine) == list(theirs) or set(mine) == set(theirs)
    for name, value in theirs.items():
        _assert_same_value(mine[name], value, name)


def _assert_same_value(mine: Any, theirs: Any, name: str) -> None:
    if isinstance(theirs, torch.Tensor):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), name
        values = (value.detach().resolve_conj().resolve_neg().contiguous() for value in (mine, theirs))
        bits = [value.reshape(-1).view(torch.uint8) for value in values]
        assert torch.equal(*bits), name
    elif isinstance(theirs, dict):
        assert_same(mine, theirs)
    elif isinstance(theirs, list | tuple):  # what rank 0 sends comes as a list
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            _assert_same_value(one, other, f"{name}.{number}")
    else:
        assert mine == theirs, name


def save_sharded(folder: Path, world_size: int = 3) -> dict[str, Any]:
    """Write model and optimizer of several ranks; returns the full values."""
    return run_ranks(_save_sharded, folder, world_size=world_size)[0]


def _save_sharded(folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = fully_shard(MixedKinds())
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.1
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    values = get_state_dict(model, optimizer, options=full)
    return {"model": dict(get_model_state_dict(model, options=full)), "optimizer": dict(values[1])}


def save_steps(folder: Path) -> None:
    """Write two checkpoints as `fsdp-compile train` does, on two ranks."""
    run_ranks(_save_steps, folder)


def _save_steps(folder: Path) -> None:
    SmallRun(folder).step_and_save(1, 2)
