"""`EMA` next to torch's `AveragedModel` in one process: the same numbers, swapped in, saved, loaded and refused."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsdp_compile
from fsdp_compile import MixedPrecision
from fsdp_compile.errors import ConfigError
from fsdp_compile.state.ema import EMA
from fsdp_compile.state.full_params import full_params
from tests import long
from tests.fsdp2.models import assert_same, batch, made, sharded
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import whole

DECAY = 0.8


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad and p.dim()], lr=0.1, momentum=0.9)


def _step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(batch(seed)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.seen += 1
    model.table.mul_(2)


def _values(model: Any) -> dict[str, torch.Tensor]:
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    every = [*model.named_parameters(), *model.named_buffers()]
    return {name: whole(value).detach().clone() for name, value in every}


def _reference(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


@torch.no_grad()
def _follow(followed: nn.Module, model: nn.Module) -> None:
    for name, value in [*followed.named_parameters(), *followed.named_buffers()]:
        value.copy_(_values(model)[name])


def ema_values(theirs: AveragedModel) -> dict[str, Any]:
    return {**theirs.state_dict(), "n_averaged": torch.tensor(0)}


@long.parametrize("shape", [(2,), (2, 2)], always=[(2, 2)])
@on_ranks(world_size=lambda shape: torch.Size(shape).numel())
def test_averages_equal_those_of_torch_in_one_process(shape: tuple[int, ...]) -> None:
    """The averages of the values that the sharded model has, bit for bit."""
    model, followed = sharded(shape=shape), made()
    ema, theirs, optimizer = EMA(model, DECAY), _reference(followed), _optimizer(model)
    for seed in range(4):
        _step(model, optimizer, seed)
        _follow(followed, model)
        ema.update()
        theirs.update_parameters(followed)
    before = _values(model)
    with contextlib.suppress(KeyError), ema.swapped_in():
        assert_same(_values(model), _values(theirs.module))
        with torch.no_grad():
            torch.testing.assert_close(model(batch(9)), theirs.module(batch(9)))
        raise KeyError
    assert_same(_values(model), before)
    with torch.no_grad():
        torch.testing.assert_close(model(batch(9)), followed(batch(9)))
    assert_same(ema.full_state_dict(), theirs.state_dict())
    with ema.swapped_in(), torch.no_grad():
        model.scale.fill_(7)
    assert ema.full_state_dict()["module.scale"] == 7, "what is written to the model inside is kept as the average"
    with ema.swapped_in():
        assert_same(EMA(model, DECAY).full_state_dict(), {**ema_values(theirs), "module.scale": torch.tensor(7.0)})


def _trained(steps: int) -> tuple[Any, EMA, torch.optim.Optimizer]:
    model = sharded(shape=(dist.get_world_size(),))
    ema, optimizer = EMA(model, DECAY), _optimizer(model)
    for seed in range(steps):
        _step(model, optimizer, seed)
        ema.update()
    return model, ema, optimizer


def _save(folder: Path) -> None:
    _, ema, _ = _trained(3)
    dcp.save({"ema": ema}, checkpoint_id=folder / "sharded")
    full = ema.full_state_dict(rank0_only=True, cpu_offload=True)
    if dist.get_rank() == 0:
        torch.save(full, folder / "full.pt")
    else:
        assert not full


def _load(folder: Path) -> None:
    full = torch.load(folder / "full.pt")
    _reference(made()).load_state_dict(full)  # torch's own
    for of in ("sharded", "full"):
        ema = EMA(sharded(1, (dist.get_world_size(),)), DECAY)
        if of == "sharded":
            dcp.load({"ema": ema}, checkpoint_id=folder / "sharded")
        else:
            ema.load_state_dict(full)
        assert ema.n_averaged == 3
        assert_same(ema.full_state_dict(), full)


def test_saved_at_two_ranks_and_loaded_at_any(tmp_path: Path) -> None:
    run_ranks(_save, tmp_path, world_size=2)
    for world_size in (1, 2, 3):
        run_ranks(_load, tmp_path, world_size=world_size)


@on_ranks()
def test_resumed_training_goes_on_bit_for_bit() -> None:
    model, ema, optimizer = _trained(2)
    resumed_model = sharded(1)
    resumed = EMA(resumed_model, DECAY)
    resumed_model.load_state_dict(model.state_dict())
    resumed.load_state_dict(ema.state_dict())
    resumed_optimizer = _optimizer(resumed_model)
    resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, average, own in ((model, ema, optimizer), (resumed_model, resumed, resumed_optimizer)):
        _step(each, own, 5)
        average.update()
    assert_same(resumed.full_state_dict(), ema.full_state_dict())


@on_ranks()
def test_buffers_that_are_cast_keep_their_precision() -> None:
    model: Any = nn.Linear(4, 4)
    shift = torch.randn(4)
    model.register_buffer("shift", shift.clone())
    fsdp_compile.fully_shard(model, mp_policy=MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16))
    ema = EMA(model, decay=0.9)
    assert model.shift.dtype is torch.bfloat16
    ema.update()
    with ema.swapped_in():
        assert torch.equal(model.state_dict()["shift"], shift)
        model.shift.add_(1)
    assert torch.equal(model.state_dict()["shift"], shift), "in full precision"
    assert not torch.equal(ema.state_dict()["module.shift"], shift)


@on_ranks()
def test_averages_follow_a_model_that_is_cast() -> None:
    model, ema, _ = _trained(2)
    theirs, followed = _reference(made()), made().double()
    theirs.load_state_dict(ema.full_state_dict())
    theirs.double()
    model.double()
    _follow(followed, model)
    ema.update()
    theirs.update_parameters(followed)
    assert_same(ema.full_state_dict(), theirs.state_dict())
    with ema.swapped_in():
        assert_same(_values(model), _values(theirs.module))


@on_ranks()
def test_averages_of_a_model_on_meta_begin_with_its_values() -> None:
    with torch.device("meta"):
        model: Any = fully_shard(nn.Linear(4, 3))
    ema = EMA(model, DECAY)
    model.to_empty(device="cpu")
    for value in (1.0, 2.0):
        nn.init.constant_(model.weight, value)
        nn.init.constant_(model.bias, value)
        ema.update()
    expected = torch.tensor(1.0).lerp(torch.tensor(2.0), 1 - DECAY)
    assert_same(_values(model), {"weight": torch.full((3, 4), 2.0), "bias": torch.full((3,), 2.0)})
    with ema.swapped_in():
        assert_same(_values(model), {"weight": expected.expand(3, 4), "bias": expected.expand(3)})


@on_ranks()
def test_names_are_the_plain_models_whatever_its_parts_are_wrapped_in() -> None:
    model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    ema = EMA(model, DECAY)
    model[0], model[1] = torch.compile(model[0], backend="eager"), checkpoint_wrapper(model[1])
    ema.update()
    full, plain = ema.full_state_dict(), _reference(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert full.keys() == ema.state_dict().keys() == plain.state_dict().keys()
    other = EMA(model, DECAY)
    other.load_state_dict(full)
    assert_same(other.full_state_dict(), full)


class WithExtraState(nn.Linear):
    scale = 1.0

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


@on_ranks()
def test_extra_state_is_the_models() -> None:
    model: Any = fully_shard(nn.Sequential(WithExtraState(4, 4)))
    ema = EMA(model, DECAY)
    ema.update()
    averaged = AveragedModel(nn.Sequential(WithExtraState(4, 4)))
    averaged.load_state_dict(ema.full_state_dict())
    model[0].scale = 2.0
    ema.load_state_dict(averaged.state_dict())
    assert ema.state_dict()["module.0._extra_state"] == {"scale": 2.0}, "the model's"


@on_ranks()
def test_wrong_uses_are_refused_before_anything_is_changed() -> None:
    model, ema, _ = _trained(1)
    with pytest.raises(ConfigError, match=r"a decay is 1\.5"):
        EMA(model, 1.5)
    with ema.swapped_in():
        for wrong in (ema.update, ema.state_dict, ema.swapped_in().__enter__):
            with pytest.raises(ConfigError, match="the averages are in the model"):
                wrong()
    with full_params(model), pytest.raises(ConfigError, match=r"is full or otherwise changed(.|\n)*EMA.update"):
        ema.update()
    state, full = ema.state_dict(), ema.full_state_dict()
    assert isinstance(state["module.first.weight"], DTensor)
    other = state["module.first.weight"].redistribute(placements=[Replicate()])
    cases = {
        "module.extra is not in both": {**full, "module.extra": torch.ones(1)},
        "n_averaged is not in both": {k: v for k, v in full.items() if k != "n_averaged"},
        "module.scale has another shape": {**state, "module.scale": torch.ones(2)},
        "module.first.weight has another shape or layout": {**full, "module.first.weight": other},
    }
    for message, case in cases.items():
        with pytest.raises(ConfigError, match=message):
            ema.load_state_dict({**case, "module.scale": case.get("module.scale", full["module.scale"]) + 1})
        assert_same(ema.full_state_dict(), full)
    model.added = nn.Parameter(torch.ones(4))
    with pytest.raises(ConfigError, match=r"it was added(.|\n)*EMA.update\(\), added"):
        ema.update()
    del model.added
    model.blocks[0].register_forward_hook(lambda *_: ema.update())
    with pytest.raises(ConfigError, match=r"EMA.update\(\) in a forward"):
        model(batch())
