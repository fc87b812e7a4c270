"""Mixed precision beyond FSDP2's policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import MixedPrecision as FSDP1MixedPrecision
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_compile._torch import fully_shard_calls as private
from fsdp_compile.config.policy import MixedPrecision
from fsdp_compile.sharding.arguments import ShardingSettings
from fsdp_compile.sharding.fully_shard import fully_shard
from tests.ranks import on_ranks
from tests.sharding.models import Block, Model, made, train_alike


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.bn(x)
        self.seen += [x.dtype, self.bn.weight.dtype, self.bn.running_mean.dtype, y.dtype]  # type: ignore[union-attr]
        return self.last(y)


def _names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(MixedPrecision(torch.bfloat16), marks=pytest.mark.long),
        FSDP1MixedPrecision(torch.bfloat16),
    ],
    ids=["ours", "fsdp1"],
)
@on_ranks()
def test_excluded_modules_compute_in_their_own_dtype(policy: Any) -> None:
    model: Any = made(_Normed)
    fully_shard(model, mp_policy=policy)
    assert _names(model) == ["", "bn"]
    inputs: list[torch.dtype] = []
    # After FSDP2's own hook, which casts.
    model.bn.register_forward_pre_hook(lambda _, args: inputs.append(args[0].dtype))
    torch.manual_seed(1)
    model(torch.randn(3, 4)).float().sum().backward()
    low, high = torch.bfloat16, torch.float32
    # Inside of its forward alone the unit is gathered.
    assert model.seen == [low, high, high, low]
    assert inputs == [high]
    assert model.bn.weight.grad.dtype is high


def test_fsdp2s_policy_excludes_nothing(fake_world: Callable[..., Any]) -> None:
    with fake_world(2):
        model = fully_shard(_Normed(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        assert not isinstance(model.bn, FSDPModule)
        excluded = fully_shard(nn.BatchNorm1d(4), mp_policy=MixedPrecision(torch.bfloat16))
        assert fsdp2.state(excluded)._mp_policy.param_dtype is torch.float32  # type: ignore[attr-defined]
        assert not isinstance(fully_shard(_Normed(), mp_policy=MixedPrecision()).bn, FSDPModule)


def test_where_inputs_are_cast(fake_world: Callable[..., Any]) -> None:
    def casts(model: Any, name: str) -> bool:
        found = fsdp2.state(model.get_submodule(name))  # type: ignore[attr-defined]
        return bool(found._mp_policy.cast_forward_inputs)

    low = torch.bfloat16
    with fake_world(2):
        split = fully_shard(Model(), mp_policy=MixedPrecisionPolicy(low, output_dtype=torch.float32))
        assert [casts(split, name) for name in ("", "blocks.0")] == [True, False]
        outputs = [fsdp2.state(m)._mp_policy.output_dtype for m in (split, split.blocks[0])]  # type: ignore[attr-defined]
        assert outputs == [torch.float32, None]
        fsdp1 = FSDP1MixedPrecision(low)  # casts inputs of the root alone
        wrapped = fully_shard(Model(), mp_policy=fsdp1, auto_wrap_policy=ModuleWrapPolicy({Block}))
        assert [casts(wrapped, name) for name in ("", "blocks.0")] == [True, False]
        both = MixedPrecision(low, cast_forward_inputs=True, cast_root_forward_inputs=False)
        wrapped = fully_shard(Model(), mp_policy=both, auto_wrap_policy=ModuleWrapPolicy({Block}))
        assert [casts(wrapped, name) for name in ("", "blocks.0")] == [False, True]
        series = Model()
        fully_shard(series.blocks[0], mp_policy=fsdp1)
        assert casts(series, "blocks.0")  # it is the root so far
        fully_shard(series, mp_policy=fsdp1)
        assert [casts(series, name) for name in ("", "blocks.0")] == [True, False]


class _Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("third", torch.tensor([1 / 3, 2 / 3]))
        self.register_buffer("count", torch.tensor([5]))
        self.linear.register_buffer("same", self.get_buffer("third"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.linear(x)) * self.get_buffer("third")[0]


def test_buffers_are_cast_once_and_saved_as_they_were(fake_world: Callable[..., Any]) -> None:
    with fake_world(2):
        model: Any = _Buffered()
        exact = model.third.clone()
        fully_shard(model, mp_policy=MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16))
        assert model.third.dtype is torch.bfloat16
        assert model.linear.same is model.third
        assert model.count.dtype is torch.int64
        assert model.bn.running_mean.dtype is torch.float32
        saved = model.state_dict()
        assert saved["third"].dtype is torch.float32
        assert torch.equal(saved["third"], exact)
        model.third.mul_(2)
        assert torch.equal(model.state_dict()["third"], (exact.bfloat16() * 2).float())
        assert torch.equal(model.state_dict()["linear.same"], (exact.bfloat16() * 2).float())
        model.load_state_dict({"third": exact * 4}, strict=False)
        assert torch.equal(model.third, (exact * 4).bfloat16())


@on_ranks()
def test_fsdp1s_policy_trains_as_fsdp2s() -> None:
    ours, theirs = made(), made()
    fully_shard(ours, mp_policy=FSDP1MixedPrecision(torch.bfloat16, torch.float32))
    inside = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for part in (theirs.embed, *theirs.blocks, theirs.head):
        fsdp2(part, mp_policy=inside)
    fsdp2(theirs, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    train_alike(ours, theirs)


def test_what_fsdp2_has_no_place_for_is_kept_with_each_unit(fake_world: Callable[..., Any]) -> None:
    policy = MixedPrecision(
        torch.bfloat16, gather_dtype=torch.int8, keep_low_precision_grads=True, full_precision_in_eval=True
    )
    with fake_world(2):
        model: Any = fully_shard(_Normed(), mp_policy=policy, separate_reduce_group=True)
        assert private.kept_with(model, "settings") == ShardingSettings(
            gather_dtype=torch.int8,
            keep_low_precision_grads=True,
            full_precision_in_eval=True,
            separate_reduce_group=True,
        )
        assert private.kept_with(model.bn, "settings") == ShardingSettings(
            full_precision_in_eval=True, casts_output_in_eval=False, separate_reduce_group=True
        )
        assert private.kept_with(model.first, "settings") is None
