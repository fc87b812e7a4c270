"""`EMA` beside torch's `AveragedModel` in one process: the same numbers, swapped in, saved, loaded and refused."""

from __future__ import annotations

import contextlib
import copy
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Replicate
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp_compile import (
    EMA,
    ConfigError,
    MixedPrecision,
    UnsupportedModelError,
    full_params,
    full_tensors,
    fully_shard,
)
from tests import long
from tests.beside import compile_eagerly
from tests.models.outlines import MixedKinds
from tests.ranks import run_ranks
from tests.sharding.test_sync_states import mesh_of

DECAY = 0.8


class How(enum.Enum):
    """How the model is sharded and run."""

    EAGER = "eager"
    COMPILED = "compiled"
    HYBRID = "hybrid"
    OFFLOADED = "offloaded"


def _make() -> Any:
    torch.manual_seed(0)
    return MixedKinds()


def _shard(model: nn.Module, how: How) -> Callable[..., torch.Tensor]:
    mesh = mesh_of((2, 2)) if how is How.HYBRID else None
    policy = CPUOffloadPolicy(pin_memory=False) if how is How.OFFLOADED else None
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return model if how is How.EAGER else compile_eagerly(model)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def _step(model: Any, called: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, seed: int) -> None:
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))  # the same on all ranks
    called(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.count += 1
    model.scratch.mul_(2)


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    full = dict(full_tensors(model))
    values = {name: full[name] for name, _ in model.named_parameters()}
    return {**values, **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def _assert_close(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        bound = 2e-2 if value.dtype is torch.bfloat16 else 2e-5  # sums of gradients are made in another order
        torch.testing.assert_close(mine[name], value, rtol=bound, atol=bound, msg=name)


def _assert_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name, value in theirs.items() if not torch.equal(mine[name], value)] == []


def _reference(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


def _check_updates(how: How) -> None:
    """The averages of the values that the sharded model has, bit for bit; and those of one process."""
    model, plain, followed = _make(), _make(), _make()
    called = _shard(model, how)
    ema = EMA(called if how is How.COMPILED else model, DECAY)  # type: ignore[arg-type]
    theirs, of_same_values = _reference(plain), _reference(followed)
    optimizers = _optimizer(model), _optimizer(plain)
    for seed in range(4):
        _step(model, called, optimizers[0], seed)
        _step(plain, plain, optimizers[1], seed)
        with torch.no_grad():
            for name, value in _values(model).items():
                _tensor(followed, name).copy_(value)
        ema.update()
        theirs.update_parameters(plain)
        of_same_values.update_parameters(followed)
    before = _values(model)
    _assert_close(before, _values(plain))
    batch = torch.randn(3, 6, generator=torch.Generator().manual_seed(9))
    with contextlib.suppress(KeyError), ema.swapped_in():
        _assert_same(_values(model), _values(of_same_values.module))
        _assert_close(_values(model), _values(theirs.module))
        _assert_same(dict(full_tensors(model)), of_same_values.module.state_dict())
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(called(batch), theirs.module.eval()(batch), rtol=2e-2, atol=2e-2)
        raise KeyError
    _assert_same(_values(model), before)
    model.train()
    _assert_same(ema.full_state_dict(), of_same_values.state_dict())
    for seed in (7, 8):  # compiled code goes on, and so do averages
        _step(model, called, optimizers[0], seed)
        _step(plain, plain, optimizers[1], seed)
        ema.update()
        theirs.update_parameters(plain)
    _assert_close(ema.full_state_dict(), theirs.state_dict())


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    owner, _, attribute = name.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(owner), attribute)
    return found


@long.parametrize("how", How, always=[How.EAGER])
def test_averages_equal_those_of_torch_in_one_process(how: How) -> None:
    run_ranks(_check_updates, how, world_size=4 if how is How.HYBRID else 2)


def _trained(steps: int) -> tuple[Any, EMA, torch.optim.Optimizer]:
    model = fully_shard(_make())
    ema, optimizer = EMA(model, DECAY), _optimizer(model)
    for seed in range(steps):
        _step(model, model, optimizer, seed)
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
    plain = _reference(_make())
    plain.load_state_dict(full)  # torch's own
    for seed, of in enumerate(("sharded", "full")):
        torch.manual_seed(seed)
        model = fully_shard(MixedKinds())
        ema = EMA(model, DECAY)
        if of == "sharded":
            dcp.load({"ema": ema}, checkpoint_id=folder / "sharded")
        else:
            ema.load_state_dict(full)
        assert ema.n_averaged == 3
        _assert_same(ema.full_state_dict(), full)
        followed = fully_shard(_make())
        set_model_state_dict(followed, dict(full_tensors(model)), options=StateDictOptions(full_state_dict=True))
        _assert_same(_values(followed), _values(model))


@pytest.mark.long
def test_saved_at_two_ranks_and_loaded_at_any(tmp_path: Path) -> None:
    run_ranks(_save, tmp_path, world_size=2)
    for world_size in (1, 2, 3):
        run_ranks(_load, tmp_path, world_size=world_size)


def _check_resumed() -> None:
    model, ema, optimizer = _trained(2)
    resumed_model = fully_shard(_make())
    resumed = EMA(resumed_model, DECAY)
    resumed_model.load_state_dict(model.state_dict())
    resumed.load_state_dict(ema.state_dict())
    for each in (model, resumed_model):
        each.scratch.zero_()  # it is saved by neither
    resumed_optimizer = _optimizer(resumed_model)
    resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, average, own in ((model, ema, optimizer), (resumed_model, resumed, resumed_optimizer)):
        _step(each, each, own, 5)
        average.update()
    _assert_same(resumed.full_state_dict(), ema.full_state_dict())


def test_resumed_training_goes_on_bit_for_bit() -> None:
    run_ranks(_check_resumed)


def _check_layouts() -> None:
    """Parameters that are frozen, thawed and cast meanwhile; a load inside of the context writes the averages."""
    model, ema, optimizer = _trained(2)
    before = ema.full_state_dict()
    model.first.requires_grad_(requires_grad=False)
    model.frozen.requires_grad_(requires_grad=True)
    _step(model, model, optimizer, 3)  # which lays the units out anew
    _assert_same(ema.full_state_dict(), before)
    ema.update()
    after = ema.full_state_dict()
    for name in ("second.weight", "scale"):
        expected = before[f"module.{name}"].lerp(_values(model)[name], 1 - DECAY)
        torch.testing.assert_close(after[f"module.{name}"], expected)
    with ema.swapped_in():
        model.second.weight.requires_grad_(requires_grad=False)
        set_model_state_dict(
            model, {"scale": torch.tensor(7.0)}, options=StateDictOptions(full_state_dict=True, strict=False)
        )
    _assert_same(ema.full_state_dict(), {**after, "module.scale": torch.tensor(7.0)})


def test_averages_follow_a_new_layout() -> None:
    run_ranks(_check_layouts)


def _check_cast_buffers() -> None:
    model: Any = nn.Linear(4, 4)
    shift = torch.randn(4)
    model.register_buffer("shift", shift.clone())
    fully_shard(model, mp_policy=MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16))
    ema = EMA(model, DECAY)
    assert model.shift.dtype is torch.bfloat16
    ema.update()
    with ema.swapped_in():
        assert torch.equal(model.state_dict()["shift"], shift)
        model.shift.add_(1)
    assert torch.equal(model.state_dict()["shift"], shift), "in full precision"
    assert not torch.equal(ema.state_dict()["module.shift"], shift)


def test_buffers_that_are_cast_keep_their_precision() -> None:
    run_ranks(_check_cast_buffers)


class WithExtraState(nn.Linear):
    """Has a state that is no tensor."""

    scale = 1.0

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


def _check_extra_state() -> None:
    model: Any = fully_shard(nn.Sequential(WithExtraState(4, 4)))
    ema = EMA(model, DECAY)
    ema.update()
    averaged = AveragedModel(nn.Sequential(WithExtraState(4, 4)))
    averaged.load_state_dict(ema.full_state_dict())
    model[0].scale = 2.0
    ema.load_state_dict(averaged.state_dict())
    assert ema.state_dict()["module.0._extra_state"] == {"scale": 2.0}, "the model's"


def test_extra_state_is_the_models() -> None:
    run_ranks(_check_extra_state)


def _check_unsharded_parameters() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, ignored_params=[model[1]])
    ema = EMA(model, DECAY)
    ema.update()
    model[1].added = nn.Parameter(torch.ones(4))
    with pytest.raises(ConfigError, match=r"was added, or changed its shape(.|\n)*EMA, 1.added"):
        ema.update()
    del model[1].added
    ema.update()
    model[1].weight = nn.Parameter(torch.zeros(8, 4))
    with pytest.raises(ConfigError, match=r"was added, or changed its shape(.|\n)*EMA, 1.weight"):
        ema.update()


def test_unsharded_parameters_that_are_added_or_resized_are_named() -> None:
    run_ranks(_check_unsharded_parameters)


def _check_refused() -> None:
    with pytest.raises(ConfigError, match=r"nothing in this model is sharded yet(.|\n)*AveragedModel"):
        EMA(_make())
    model = fully_shard(_make())
    with pytest.raises(ConfigError, match=r"a decay is 1\.5"):
        EMA(model, 1.5)
    with pytest.raises(UnsupportedModelError, match=r"EMA\(model, decay\) in the place of AveragedModel"):
        AveragedModel(model)
    with pytest.raises(ConfigError, match=r"was sharded together(.|\n)*whole model"):
        EMA(model.first)
    ema = EMA(model)
    with ema.swapped_in():
        for wrong in (ema.update, ema.state_dict, ema.swapped_in().__enter__):
            with pytest.raises(ConfigError, match="the averages are in the model"):
                wrong()
    with full_params(model), pytest.raises(ConfigError, match="held in full"):
        ema.update()
    model.register_forward_hook(lambda *_: ema.update())
    with pytest.raises(ConfigError, match=r"EMA.update\(\) in a forward"):
        fully_shard(nn.Sequential(model))(torch.ones(2, 6))


def _check_wrong_states() -> None:
    _, ema, _ = _trained(1)
    state, full = ema.state_dict(), ema.full_state_dict()
    cases = {
        "module.extra is not in the model": {**full, "module.extra": torch.ones(1)},
        "n_averaged is missing": {k: v for k, v in full.items() if k != "n_averaged"},
        r"shape \(2,\), and \(\)": {**state, "module.scale": torch.ones(2)},
    }
    weight: Any = fully_shard(nn.Linear(6, 7)).weight
    whole = weight.redistribute(placements=[Replicate()])
    cases["other rows"] = {**full, "module.first.weight": whole, "module.scale": torch.tensor(3.0)}
    for message, case in cases.items():
        with pytest.raises(ConfigError, match=message):
            ema.load_state_dict(case)
        _assert_same(ema.full_state_dict(), full)


@pytest.mark.parametrize("check", [_check_refused, _check_wrong_states])
def test_wrong_uses_are_refused_before_anything_is_changed(check: Callable[[], None]) -> None:
    run_ranks(check)
