"""The lines of docs/migrate.md: what is written in the place of DDP's and FSDP1's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import CPUOffload, MixedPrecision, OptimStateKeyType, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile import full_params, fully_shard, no_sync, rekey_optim_state_dict, units
from tests.ranks import on_ranks
from tests.two_sides import compare_gradients, compare_parameters, compile_eagerly, whole

CLOSE = (1.3e-6, 1e-5)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def _batch() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(7))


def _train(called: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        called(_batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks()
def test_what_ddp_has_saved_is_resumed(tmp_path: Path) -> None:
    """Saved by DDP's lines after two steps, and resumed sharded: as four steps of one process."""
    reference = _model()
    optimizer = _adamw(reference)
    _train(reference, optimizer)
    saved = copy.deepcopy((reference.state_dict(), optimizer.state_dict()))
    _train(reference, optimizer)
    if (rank := dist.get_rank()) == 0:
        torch.save(saved[1], tmp_path / "optimizer.pt")

    resumed = fully_shard(_model(seed=1 + rank))
    state_dict.set_model_state_dict(resumed, saved[0] if rank == 0 else {}, options=FROM_RANK_0)
    optimizer, path = _adamw(resumed), tmp_path / "optimizer.pt"
    state = {}
    if rank == 0:
        state = rekey_optim_state_dict(torch.load(path), OptimStateKeyType.PARAM_NAME, resumed, optim=optimizer)
    state_dict.set_optimizer_state_dict(resumed, optimizer, state, options=FROM_RANK_0)
    _train(compile_eagerly(resumed), optimizer)
    compare_parameters(resumed, reference)


@on_ranks()
def test_ddps_lines() -> None:
    rank, reference = dist.get_rank(), _model()
    model = fully_shard(_model(seed=rank), sync_module_states=True)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    compare_parameters(model, reference, within=CLOSE)
    for each in (model, reference):
        with no_sync(each) if each is model else contextlib.nullcontext():
            each(_batch()).square().mean().backward()
        each(2 * _batch()).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
    compare_gradients(model, reference, within=CLOSE)
    with full_params(model, rank0_only=True, writeback=False):
        if rank == 0:
            torch.testing.assert_close(model(_batch()), reference(_batch()))
    with full_params(model):
        assert type(model.get_parameter("0.weight")) is nn.Parameter


def _reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


@on_ranks()
def test_arguments_of_fsdp1() -> None:
    with torch.device("meta"):
        model = _model()
    ignored = nn.Parameter(torch.ones(4))
    model.register_parameter("ignored", ignored)
    torch.manual_seed(0)
    fully_shard(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        ignored_params=[ignored],
        mp_policy=MixedPrecision(param_dtype=torch.bfloat16),
        offload_policy=CPUOffload(offload_params=False),
        param_init_fn=_reset,
        sync_module_states=True,
        device_id=torch.device("cpu"),
    )
    assert [unit.title for unit in units(model) if unit.groups] == ["0", "2"]
    assert not isinstance(ignored, DTensor)
    torch.testing.assert_close(whole(model.get_parameter("0.weight")), _model().get_parameter("0.weight"))
    assert model(_batch()).dtype is torch.bfloat16
