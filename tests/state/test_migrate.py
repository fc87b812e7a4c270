"""What DDP has saved is resumed sharded, by the lines of docs/migrate.md."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import OptimStateKeyType

from fsdp_compile import fully_shard, rekey_optim_state_dict
from tests.ranks import run_ranks
from tests.two_sides import compare_parameters, compile_eagerly

FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def _train(called: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(7))
    for _ in range(steps):
        called(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _check_resumed_from_ddp(folder: Path) -> None:
    """Saved by DDP's lines after two steps, and resumed sharded: as four steps of one process."""
    reference = _model()
    optimizer = _adamw(reference)
    _train(reference, optimizer)
    saved = copy.deepcopy((reference.state_dict(), optimizer.state_dict()))
    _train(reference, optimizer)
    if (rank := dist.get_rank()) == 0:
        torch.save(saved[1], folder / "optimizer.pt")

    resumed = fully_shard(_model(seed=1 + rank))
    state_dict.set_model_state_dict(resumed, saved[0] if rank == 0 else {}, options=FROM_RANK_0)
    optimizer, path = _adamw(resumed), folder / "optimizer.pt"
    state = {}
    if rank == 0:
        state = rekey_optim_state_dict(torch.load(path), OptimStateKeyType.PARAM_NAME, resumed, optim=optimizer)
    state_dict.set_optimizer_state_dict(resumed, optimizer, state, options=FROM_RANK_0)
    _train(compile_eagerly(resumed), optimizer)
    compare_parameters(resumed, reference)


def test_what_ddp_has_saved_is_resumed(tmp_path: Path) -> None:
    run_ranks(_check_resumed_from_ddp, tmp_path)
