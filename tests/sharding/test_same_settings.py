"""Ranks that shard a model differently are told so, by name, before their first collective of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import RankMismatchError, fully_shard
from fsdp_compile.sharding import same_settings
from tests import long
from tests.models.kinds import WIDTH, Stack
from tests.ranks import run_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
ENDS_WITHIN_S = 10.0
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "param_dtype": ({"mp_policy": BF16}, "param_dtype torch.bfloat16] on rank 1"),
    "reshard": ({"reshard_after_forward": False}, "reshard Reshard.AFTER_BACKWARD] on rank 1"),
}
"""What rank 1 alone gives to `fully_shard`, and what the error says of it."""


def _refusal(model: nn.Module, *, compiled: bool) -> tuple[str, float]:
    """With what a first step is refused, and after how many seconds."""
    run = torch.compile(model, backend="fsdp", options={"lower": "eager"}) if compiled else model
    dist.barrier()
    start_s = time.monotonic()
    with pytest.raises((BackendCompilerFailed, RankMismatchError)) as caught:
        run(torch.ones(2, WIDTH)).sum().backward()
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, RankMismatchError)
    return str(error), time.monotonic() - start_s


def _other_settings(settings: dict[str, Any], *, compiled: bool, synced: bool) -> tuple[str, float]:
    own = settings if dist.get_rank() == 1 else {}
    return _refusal(fully_shard(Stack(), sync_module_states=synced, **own), compiled=compiled)


@pytest.mark.core
@long.parametrize(
    ("difference", "compiled", "synced"),
    [
        ("param_dtype", False, False),
        ("param_dtype", True, False),
        ("param_dtype", False, True),
        ("reshard", False, False),
    ],
    always=[("param_dtype", False, False), ("reshard", False, False)],
)
def test_another_setting_of_one_rank_is_named_on_all(difference: str, *, compiled: bool, synced: bool) -> None:
    settings, said = DIFFERENCES[difference]
    found = run_ranks(_other_settings, settings, compiled=compiled, synced=synced, timeout_s=60)
    assert len({message for message, _ in found}) == 1
    assert "rank 0 and rank 1 shard a model differently" in found[0][0]
    assert said in found[0][0]
    assert "[blocks.0." in found[0][0]
    assert max(seconds for _, seconds in found) < ENDS_WITHIN_S


def _other_version() -> str:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(same_settings, "_versions", lambda: ["version of torch: 2.0.0"])
        return _refusal(fully_shard(Stack()), compiled=False)[0]


def test_another_version_is_named() -> None:
    for message in run_ranks(_other_version, timeout_s=60):
        assert "[version of torch: 2." in message
        assert "[version of torch: 2.0.0] on rank 1" in message


def _other_model() -> str:
    layers = [nn.Linear(WIDTH, WIDTH + dist.get_rank()), nn.Identity()]
    return _refusal(fully_shard(nn.Sequential(*layers)), compiled=False)[0]


def test_another_shape_is_named() -> None:
    for message in run_ranks(_other_model, timeout_s=60):
        assert f"[0.weight: shape ({WIDTH}, {WIDTH})] on rank 0" in message
        assert f"[0.weight: shape ({WIDTH + 1}, {WIDTH})] on rank 1" in message


def _on_a_mesh() -> str:
    own: dict[str, Any] = {"mp_policy": BF16} if dist.get_rank() == 3 else {}
    model = fully_shard(Stack(), mesh=init_device_mesh("cpu", (2, 2)), **own)
    return _refusal(model, compiled=False)[0]


@pytest.mark.long
def test_ranks_of_other_groups_do_not_wait() -> None:
    """Ranks 0 and 1 shard alike, and would wait for their replicas."""
    for message in run_ranks(_on_a_mesh, world_size=4, timeout_s=60):
        assert "on rank 3" in message


def _on_apart_meshes() -> float:
    """Ranks whose parts are of other groups of ranks may have other settings there."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "shard"))["shard"]
    own: dict[str, Any] = {"mp_policy": BF16} if dist.get_rank() >= 2 else {}
    fully_shard(model, mesh=mesh, **own)
    return model(torch.ones(2, WIDTH)).sum().item()


@pytest.mark.long
def test_ranks_that_share_no_parameter_may_differ() -> None:
    assert len(run_ranks(_on_apart_meshes, world_size=4, timeout_s=60)) == 4


def _the_next_model() -> float:
    own: dict[str, Any] = {"mp_policy": BF16} if dist.get_rank() == 1 else {}
    _refusal(fully_shard(Stack(), **own), compiled=False)
    return fully_shard(Stack())(torch.ones(2, WIDTH)).sum().item()


def test_a_later_model_of_ranks_that_caught_the_error_trains() -> None:
    first, second = run_ranks(_the_next_model, timeout_s=60)
    assert first == second
