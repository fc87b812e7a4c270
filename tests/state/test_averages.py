"""Moving averages of weights beside a sharded model: made before it is sharded, and sharded like it."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp_compile import EMA, fully_shard
from tests import long
from tests.fake_world import fake_world
from tests.ranks import on_ranks
from tests.two_sides import compile_eagerly, whole


class Average(enum.Enum):
    """How weights are averaged."""

    MEAN = "mean"
    MOVING = "moving"
    BY_STATE_DICTS = "by state dicts"
    """As timm's ModelEmaV3 with `foreach=False`."""
    BY_COPIES = "by copies"
    """As timm's ModelEmaV2."""
    BY_PARAMETERS = "by parameters"
    """As timm's ModelEmaV3 with `exclude_buffers=True`."""


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 4))


def _averaged(model: nn.Module, how: Average) -> tuple[nn.Module, Callable[[], object]]:
    update = _TIMMS.get(how)
    if update is not None:
        kept = copy.deepcopy(model).eval()
        return kept, lambda: update(kept, model)
    average = None if how is Average.MEAN else get_ema_multi_avg_fn(0.9)
    made = AveragedModel(model, multi_avg_fn=average)
    return made.module, lambda: made.update_parameters(model)


@torch.no_grad()
def _update_by_state_dicts(kept: nn.Module, model: nn.Module) -> None:
    for held, new in zip(kept.state_dict().values(), model.state_dict().values(), strict=True):
        if held.is_floating_point():
            held.lerp_(new, 0.1)
        else:
            held.copy_(new)


@torch.no_grad()
def _update_by_copies(kept: nn.Module, model: nn.Module) -> None:
    for held, new in zip(kept.state_dict().values(), model.state_dict().values(), strict=True):
        held.copy_(0.9 * held + (1.0 - 0.9) * new)


@torch.no_grad()
def _update_by_parameters(kept: nn.Module, model: nn.Module) -> None:
    torch._foreach_lerp_(list(kept.parameters()), list(model.parameters()), weight=0.1)
    for held, new in zip(kept.buffers(), model.buffers(), strict=True):
        held.copy_(new)


_TIMMS: dict[Average, Callable[[nn.Module, nn.Module], None]] = {
    Average.BY_STATE_DICTS: _update_by_state_dicts,
    Average.BY_COPIES: _update_by_copies,
    Average.BY_PARAMETERS: _update_by_parameters,
}


def _trained(how: Average, *, sharded: bool, compiled: bool) -> nn.Module:
    model = _model()
    averaged, update = _averaged(model, how)
    called: Any = model
    if sharded:
        fully_shard(model)
        fully_shard(averaged)
        called = compile_eagerly(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        called(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        update()
    return averaged


@long.parametrize("compiled", [False, True], always=[False])
@long.parametrize("how", Average, always=[Average.MOVING])
@on_ranks()
def test_averages_equal_one_process(how: Average, *, compiled: bool) -> None:
    mine = _trained(how, sharded=True, compiled=compiled)
    theirs = _trained(how, sharded=False, compiled=False)
    for one, other in zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(whole(one), other)
    batch = torch.ones(2, 6)
    torch.testing.assert_close(mine.eval()(batch), theirs.eval()(batch))


@on_ranks()
def test_copies_of_sharded_models_are_refused() -> None:
    model = fully_shard(_model())
    for copied in (copy.deepcopy, AveragedModel):
        with pytest.raises(AssertionError, match="does not support deepcopy"):  # FSDP2's own
            copied(model)


def test_full_averages_have_the_names_of_the_plain_model() -> None:
    with fake_world(2):
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model.register_module("0", torch.compile(model[0], backend="eager"))  # type: ignore[arg-type]
        names = list(EMA(model, decay=0.5).full_state_dict())
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert names == list(AveragedModel(plain).state_dict())
