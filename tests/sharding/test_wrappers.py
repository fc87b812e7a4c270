"""Models of DDP and FSDP1 train on here from where they stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fsdp_compile
from fsdp_compile import ConfigError, fully_shard
from tests import long
from tests.models.kinds import WIDTH, Block, Stack
from tests.ranks import on_ranks
from tests.two_sides import close, compile_eagerly, made

Call = Callable[[torch.Tensor], torch.Tensor]
W = TypeVar("W", bound=nn.Module)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def _step(call: Call, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
    call(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _trained(wrapped: W, steps: int) -> tuple[W, torch.optim.Optimizer]:
    optimizer = _adamw(wrapped)
    for number in range(steps):
        _step(wrapped, optimizer, number)
    return wrapped, optimizer


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    with fsdp_compile.full_params(model, writeback=False):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@on_ranks()
def test_ddps_module_goes_on_where_it_stopped() -> None:
    expected, _ = _trained(DistributedDataParallel(made(Stack)), 4)
    wrapped, optimizer = _trained(DistributedDataParallel(made(Stack)), 2)
    with pytest.raises(ConfigError, match="DistributedDataParallel averages gradients by itself"):
        compile_eagerly(wrapped)(torch.ones(2, WIDTH))
    model = wrapped.module
    del wrapped
    compiled = compile_eagerly(model)
    for number in range(2, 4):
        _step(compiled, optimizer, number)
    mine = _full(model)
    for name, parameter in expected.module.named_parameters():
        close(mine[name], parameter, name)


FSDP1: dict[str, dict[str, Any]] = {
    "units": {"auto_wrap_policy": ModuleWrapPolicy({Block})},
    "bf16": {
        "auto_wrap_policy": ModuleWrapPolicy({Block}),
        "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, _module_classes_to_ignore=[nn.LayerNorm]),
        "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
    },
    "whole": {},
}


@long.parametrize("case", FSDP1, always=["bf16"])
@on_ranks()
def test_fsdp1s_arguments_have_its_units_policies_and_state(case: str) -> None:
    settings = FSDP1[case]
    fsdp1 = FullyShardedDataParallel(made(Stack), use_orig_params=True, device_id=torch.device("cpu"), **settings)
    wrapped, optimizer = _trained(fsdp1, 2)
    model = made(Stack)
    with FullyShardedDataParallel.summon_full_params(wrapped):
        model.load_state_dict({n.replace("_fsdp_wrapped_module.", ""): p for n, p in wrapped.named_parameters()})
    renamed = {"mp_policy" if name == "mixed_precision" else name: value for name, value in settings.items()}
    fully_shard(model, **renamed)
    # As docs/migrate.md has it.
    state = get_optimizer_state_dict(wrapped, optimizer, options=StateDictOptions(full_state_dict=True))
    mine = _adamw(model)
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, mine, state if dist.get_rank() == 0 else {}, options=from_rank_0)
    compiled = compile_eagerly(model)
    for number in range(2, 4):
        _step(wrapped, optimizer, number)
        _step(compiled, mine, number)
    values = _full(model)
    with FullyShardedDataParallel.summon_full_params(wrapped):
        for name, parameter in wrapped.named_parameters():
            plain = name.replace("_fsdp_wrapped_module.", "")
            if case == "bf16":  # FSDP1 computes the norms' inputs in another dtype
                torch.testing.assert_close(values[plain], parameter.detach(), rtol=1e-2, atol=2e-3)
            else:
                close(values[plain], parameter, plain)
    found = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    assert found == UNITS[case]


UNITS = {
    "units": {"", "blocks.0", "blocks.1"},
    # FSDP1 makes units of what mixed precision excludes.
    "bf16": {"", "blocks.0", "blocks.0.norm", "blocks.1", "blocks.1.norm"},
    "whole": {"", "blocks.0", "blocks.1", "head"},  # no policy: the automatic split
}
