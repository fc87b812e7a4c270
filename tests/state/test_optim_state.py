"""Optimizer state by names, full or sharded, saved and loaded: `optim_state_dict` and `optim_state_dict_to_load`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    LocalOptimStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_compile import (
    ConfigError,
    RankMismatchError,
    full_params,
    fully_shard,
    optim_state_dict,
    optim_state_dict_to_load,
    rekey_optim_state_dict,
    units,
)
from tests import long
from tests.beside import compile_eagerly
from tests.ranks import run_ranks
from tests.state.optim_models import (
    OPTIMIZERS,
    all_values,
    assert_same,
    kinds,
    optimizer_of,
    sharded,
    train,
    whole,
)
from tests.state.test_full_tensors import _Alive, _messages_of

RANK_0 = FullOptimStateDictConfig(rank0_only=True)
CONFIGS: dict[str, OptimStateDictConfig | None] = {
    "by default": None,
    "full": FullOptimStateDictConfig(offload_to_cpu=False),
    "of rank 0": RANK_0,
    "sharded": ShardedOptimStateDictConfig(offload_to_cpu=False),
    "sharded, on the host": ShardedOptimStateDictConfig(),
}
WITHOUT_STATE = {"frozen", "unread"}


def _trained(name: str, mesh: tuple[int, ...] = (2,)) -> tuple[Any, optim.Optimizer]:
    model = sharded(mesh=mesh)
    optimizer = optimizer_of(model, name)
    train(model, optimizer)
    return model, optimizer


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"{key} of {name}": value for name, held in state["state"].items() for key, value in held.items()}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _assert_is_of_one_process(state: dict[str, Any], name: str) -> None:
    """Keys, shapes, dtypes and groups of a full state dict are those of one process; so are values, up to sums."""
    reference = kinds()
    optimizer = optimizer_of(reference, name)
    train(reference, optimizer)
    expected = rekey_optim_state_dict(optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, reference, optim=optimizer)
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    assert set(dict(reference.named_parameters())) - state["state"].keys() == WITHOUT_STATE
    mine, theirs = _tensors(state), _tensors(expected)
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        assert type(mine[key]) is torch.Tensor, key
        assert (mine[key].dtype, mine[key].shape) == (value.dtype, value.shape), key
        # Adafactor's steps are relative, so that a rounding in the bfloat16 layer shows everywhere.
        bound = 2e-2 if mine[key].dtype is torch.bfloat16 or "Adafactor" in name else 1e-5
        torch.testing.assert_close(mine[key], value, rtol=bound, atol=bound, msg=key)
    steps = [value for key, value in mine.items() if key.startswith("step of")]
    assert all(step.dim() == 0 and step.device.type == "cpu" for step in steps)


def _check_round_trip(name: str) -> None:
    model, optimizer = _trained(name)
    expected = all_values(model, optimizer)
    saved = {kind: optim_state_dict(model, optimizer, config=config) for kind, config in CONFIGS.items()}
    for kind in ("by default", "full"):
        _assert_is_of_one_process(saved[kind], name)
    assert bool(saved["of rank 0"]) == (dist.get_rank() == 0)
    for kind in ("sharded", "sharded, on the host"):
        assert saved[kind]["param_groups"] == saved["full"]["param_groups"]
        for key, value in _tensors(saved[kind]).items():
            of_shard = isinstance(value, DTensor)
            assert of_shard == (
                key.partition(" of ")[2] != "ignored" and _has_shape_of_its_parameter(model, key, value)
            )
    assert_same(all_values(model, optimizer), expected)
    train(model, optimizer)  # what was saved is memory of its own
    goes_on = all_values(model, optimizer)
    for kind, config in CONFIGS.items():
        resumed = sharded()
        other = optimizer_of(resumed, name)
        with torch.no_grad():
            for parameter, value in zip(resumed.parameters(), model.parameters(), strict=True):
                parameter.copy_(value)
        loaded = optim_state_dict_to_load(resumed, other, saved[kind], config=config)
        assert not other.state, "it is not changed yet"
        other.load_state_dict(loaded)
        of_optimizer = {key: value for key, value in expected.items() if not key.startswith("model")}
        found = all_values(resumed, other)
        assert_same({key: value for key, value in found.items() if not key.startswith("model")}, of_optimizer)
        _assert_laid_out(resumed, other)
    resumed = sharded()
    other = optimizer_of(resumed, name)
    train(resumed, other)  # to the same parameters
    optim_state_dict_to_load(resumed, other, saved["of rank 0"], load_directly=True, config=RANK_0)
    train(resumed, other)
    assert_same(all_values(resumed, other), goes_on)


def _has_shape_of_its_parameter(model: Any, key: str, value: torch.Tensor) -> bool:
    state, _, name = key.partition(" of ")
    return state != "step" and value.shape == model.get_parameter(name).shape


def _assert_laid_out(model: Any, optimizer: optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            is_sharded = isinstance(parameter, DTensor) and key != "step" and value.shape == parameter.shape
            assert isinstance(value, DTensor) == is_sharded, key
            if isinstance(value, DTensor):
                assert value.placements == parameter.placements  # type: ignore[attr-defined]
                assert value.to_local().shape == parameter.to_local().shape  # type: ignore[attr-defined]


@pytest.mark.core
@long.parametrize("name", OPTIMIZERS, always=["AdamW"])
def test_state_of_every_kind_comes_back_bit_for_bit(name: str) -> None:
    run_ranks(_check_round_trip, name)


def _save(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer = _trained(name)
    return optim_state_dict(model, optimizer), all_values(model, optimizer)


def _load(name: str, mesh: tuple[int, ...], saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
    model = sharded(mesh=mesh)
    state, expected = saved
    for config in (None, RANK_0):
        optimizer = optimizer_of(model, name)
        given = state if config is None or dist.get_rank() == 0 else {}
        optim_state_dict_to_load(model, optimizer, given, load_directly=True, config=config)
        found = all_values(model, optimizer)
        assert_same(
            {key: value for key, value in found.items() if not key.startswith("model")},
            {key: value for key, value in expected.items() if not key.startswith("model")},
        )
        again = optim_state_dict(model, optimizer, config=config)
        if given:
            assert_same(_tensors(again), _tensors(state))
        else:
            assert not again


@long.parametrize("name", ["flat AdamW", "whole Adafactor"], always=["flat AdamW"])
@long.parametrize("mesh", [(1,), (3,), (2, 2)], always=[(3,)])
def test_full_state_is_loaded_by_any_number_of_ranks(name: str, mesh: tuple[int, ...]) -> None:
    saved = run_ranks(_save, name)[0]
    run_ranks(_load, name, mesh, saved, world_size=torch.Size(mesh).numel())


def _check_through_dcp(folder: Path) -> None:
    model, optimizer = _trained("AdamW")
    state = optim_state_dict(model, optimizer, config=ShardedOptimStateDictConfig())
    dcp.save({"optimizer": state}, checkpoint_id=folder)
    other = optimizer_of(model, "AdamW")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    model.unread.grad = None
    other.step()
    into = {"optimizer": optim_state_dict(model, other, config=ShardedOptimStateDictConfig())}
    dcp.load(into, checkpoint_id=folder)
    optim_state_dict_to_load(model, other, into["optimizer"], load_directly=True)
    mine, theirs = all_values(model, other), all_values(model, optimizer)
    assert_same(mine, theirs)


@pytest.mark.long
def test_sharded_state_goes_through_distributed_checkpoints(tmp_path: Path) -> None:
    run_ranks(_check_through_dcp, tmp_path)


def _check_memory(message: int) -> dict[str, int]:
    """Peaks of memory while state of four layers is saved to rank 0 and loaded from it."""
    model = fully_shard(nn.Sequential(*(nn.Linear(255, 257, bias=False) for _ in range(4))))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    peaks = {}
    with _messages_of(message):
        with _Alive() as alive:
            state = optim_state_dict(model, optimizer, config=RANK_0)
        peaks["saved"] = alive.peak
        with _Alive() as alive:
            loaded = optim_state_dict_to_load(model, optimizer, state, config=RANK_0)
        peaks["loaded"] = alive.peak
    assert len(loaded["state"]) == 4
    return peaks


def test_other_ranks_hold_their_parts_alone() -> None:
    one, message = 255 * 257 * 4, 9000
    first, *others = run_ranks(_check_memory, message, world_size=3)
    assert 4 * one < first["saved"] < 4 * one + 6 * message
    assert first["loaded"] < 4 * one / 3 + 3.5 * one, "its parts, and one value in rows"
    for peaks in others:
        assert peaks["saved"] < 6 * message
        assert peaks["loaded"] < 4 * one / 3 + one, "its parts, and one value's rows"


def _check_collectives() -> None:
    model, optimizer = _trained("AdamW")
    full = optim_state_dict(model, optimizer)
    with CommDebugMode() as mode:
        optim_state_dict_to_load(model, optimizer, full, load_directly=True)
        model.state_dict()
        optimizer.state_dict()
    assert mode.get_total_counts() == 0
    with CommDebugMode() as mode:
        optim_state_dict_to_load(model, optimizer, full, config=RANK_0)
    counts = {str(key): count for key, count in mode.get_comm_counts().items()}
    of_shards = sum(isinstance(v, DTensor) and v.dim() > 0 for s in optimizer.state.values() for v in s.values())
    assert sum(count for key, count in counts.items() if "scatter" in key) >= of_shards, counts
    assert not any("all_gather" in key for key in counts), counts


def test_full_state_on_all_ranks_is_cut_without_communication() -> None:
    run_ranks(_check_collectives)


def _other_groups(model: Any) -> optim.Optimizer:
    """The groups of `optimizer_of` the other way round, and the parameters in them, too."""
    first: list[Any] = [model.scale, model.frozen, *model.norm.parameters()]
    known = {id(p) for p in first}
    others = [p for p in model.parameters() if id(p) not in known]
    return optim.AdamW([{"params": others[::-1]}, {"params": first[::-1]}], lr=1.0, amsgrad=True)


def _check_named_groups() -> None:
    """Groups of torch's `named_parameters()` keep the names of their own parameters."""
    model = sharded()
    every = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = optim.AdamW(every, lr=0.1)
    train(model, optimizer)
    state = optim_state_dict(model, optimizer)
    for groups in ([every[::-1]], [every[2:]], [every[:2], every[2:]]):
        other = optim.AdamW([{"params": group, "lr": 0.2} for group in groups])
        optim_state_dict_to_load(model, other, state, load_directly=True)
        assert [group["param_names"] for group in other.param_groups] == [[n for n, _ in group] for group in groups]
        assert {group["lr"] for group in other.param_groups} == {0.1}
    again = optim.AdamW(every, lr=0.2)
    optim_state_dict_to_load(model, again, optim_state_dict(model, other), load_directly=True)
    assert again.param_groups[0]["param_names"] == [name for name, _ in every]


def test_names_in_groups_are_no_settings() -> None:
    run_ranks(_check_named_groups)


def _check_groups() -> None:
    model, optimizer = _trained("AdamW")
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    schedule.step()
    state = optim_state_dict(model, optimizer)
    other = _other_groups(model)
    resumed = optim.lr_scheduler.StepLR(other, 1, 0.5)
    optim_state_dict_to_load(model, other, state, load_directly=True)
    assert [group["lr"] for group in other.param_groups] == [0.025, 0.005]
    assert [group["initial_lr"] for group in other.param_groups] == [0.05, 0.01]
    for parameter, held in optimizer.state.items():
        assert_same(other.state[parameter], held)
    resumed.load_state_dict(schedule.state_dict())
    for each in (schedule, resumed):
        each.step()
    assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in optimizer.param_groups][::-1]

    one_group = optim.AdamW(model.parameters(), lr=1.0)
    with pytest.raises(ConfigError, match=r"group 0 were saved in several groups, whose settings differ"):
        optim_state_dict_to_load(model, one_group, state)
    alike = copy.deepcopy(state)
    for group, rate in zip(alike["param_groups"], (0.01, 0.010004), strict=True):
        group["lr"] = group["initial_lr"] = torch.tensor(rate)  # which print the same
    one_group.param_groups[0]["initial_lr"] = 1.0
    with pytest.raises(ConfigError, match=r"group 0 were saved in several groups, whose settings differ"):
        optim_state_dict_to_load(model, one_group, alike)
    part = optim.AdamW([model.first.weight], lr=1.0)
    optim_state_dict_to_load(model, part, state, load_directly=True)
    assert part.param_groups[0]["lr"] == 0.025
    assert list(part.state) == [model.first.weight]
    with_new = optim.AdamW([{"params": [model.unread], "lr": 7.0}, {"params": [model.scale]}])  # type: ignore[arg-type]
    without = {"state": {"scale": state["state"]["scale"]}, "param_groups": [state["param_groups"][0]]}
    optim_state_dict_to_load(model, with_new, without, load_directly=True)
    assert [group["lr"] for group in with_new.param_groups] == [7.0, 0.005]


def test_groups_are_matched_by_their_parameters() -> None:
    run_ranks(_check_groups)


def _check_odd_entries() -> None:
    model, optimizer = _trained("AdamW")
    optimizer.state["mine"] = {"seen": torch.arange(3), "note": "kept"}  # type: ignore[index]
    optimizer.state[model.scale]["shampoo"] = {
        "factors": [torch.ones(2, 2), None],
        "like": model.scale.detach().clone(),
    }
    state = optim_state_dict(model, optimizer)
    assert type(state["state"]["scale"]["shampoo"]["like"]) is torch.Tensor
    assert "tied.weight" not in state["state"]
    del state["state"]["second.bias"]
    renamed = copy.deepcopy(state)
    renamed["state"]["tied.weight"] = renamed["state"].pop("first.weight")
    for config in (None, RANK_0):
        for given in (state, renamed):
            other = optimizer_of(model, "AdamW")
            optim_state_dict_to_load(model, other, given, load_directly=True, config=config)
            mine: Any = other.state["mine"]  # type: ignore[index]
            assert torch.equal(mine["seen"], torch.arange(3))
            assert mine["note"] == "kept"
            held = other.state[model.scale]["shampoo"]
            assert torch.equal(held["factors"][0], torch.ones(2, 2))
            assert isinstance(held["like"], torch.Tensor)
            assert model.second.bias not in other.state
            assert_same(other.state[model.first.weight], optimizer.state[model.first.weight])
    for each in (state, {"state": state["state"]}):
        for config in (None, RANK_0):
            loaded = optim_state_dict_to_load(model, optimizer, each, config=config)
            assert ("param_groups" in loaded) == ("param_groups" in each)
    only_state = optim_state_dict(model, optimizer, {"state": optimizer.state_dict()["state"]})
    assert set(only_state) == {"state"}
    by_name = optim_state_dict(model, optimizer, optim_state_dict(model, optimizer, config=CONFIGS["sharded"]))
    moment = optimizer.state[model.second.weight]["exp_avg"]
    assert torch.equal(_tensors(by_name)["exp_avg of second.weight"], whole(moment))


def test_missing_tied_nested_and_user_defined_state() -> None:
    run_ranks(_check_odd_entries)


class _Case(NamedTuple):
    """What refused calls are made with: a model, its optimizer, and the state of that one."""

    model: Any
    optimizer: optim.Optimizer
    state: dict[str, Any]


Call = Callable[[_Case], Any]


def _with(state: dict[str, Any], name: str, key: str, value: Any) -> dict[str, Any]:
    return {**state, "state": {**state["state"], name: {**state["state"].get(name, {}), key: value}}}


REFUSED: dict[str, tuple[str, Call]] = {
    "numbers": (
        r"numbers parameters(.|\n)*rekey_optim_state_dict",
        lambda c: optim_state_dict_to_load(c.model, c.optimizer, c.optimizer.state_dict()),
    ),
    "no state": (r"has no 'state'(.|\n)*rank0_only=True", lambda c: optim_state_dict_to_load(c.model, c.optimizer, {})),
    "shape": (
        r"'exp_avg' of first.bias has shape \(3,\), and the parameter \(7,\)",
        lambda c: optim_state_dict_to_load(
            c.model, c.optimizer, _with(c.state, "first.bias", "exp_avg", torch.ones(3))
        ),
    ),
    "0-d": (
        r"'exp_avg' of first.bias has shape \(\), and the parameter",
        lambda c: optim_state_dict_to_load(
            c.model, c.optimizer, _with(c.state, "first.bias", "exp_avg", torch.ones(()))
        ),
    ),
    "meta": (
        r"'exp_avg' of first.bias is on the meta device",
        lambda c: optim_state_dict_to_load(
            c.model, c.optimizer, _with(c.state, "first.bias", "exp_avg", torch.ones(7, device="meta"))
        ),
    ),
    "unknown name": (
        r"third.weight is not in the model",
        lambda c: optim_state_dict_to_load(
            c.model, c.optimizer, {**c.state, "param_groups": [{"params": ["third.weight"]}]}
        ),
    ),
    "both kinds of keys": (
        r"keys of types \['int', 'str'\]",
        lambda c: optim_state_dict_to_load(c.model, c.optimizer, {"state": {0: {}, "scale": {}}}),
    ),
    "local type": (
        r"LocalOptimStateDictConfig(.|\n)*to_local\(\)",
        lambda c: optim_state_dict(c.model, c.optimizer, config=LocalOptimStateDictConfig()),
    ),
    "other number": (
        r"state of parameter 99",
        lambda c: optim_state_dict(c.model, c.optimizer, {"state": {99: {}}}),
    ),
    "other model": (
        r"group 0 has a parameter of shape \(2, 2\) that the model does not have",
        lambda c: optim_state_dict(c.model, optim.SGD([nn.Parameter(torch.ones(2, 2))])),
    ),
    "plain model": (
        r"nothing in this model is sharded(.|\n)*fully_shard",
        lambda c: optim_state_dict(nn.Linear(2, 2), c.optimizer),
    ),
    "other group": (
        r"group has ranks \[0\](.|\n)*no group",
        lambda c: optim_state_dict(c.model, c.optimizer, group=_alone()),
    ),
    "sharded from rank 0": (
        r"is a DTensor, and the first rank alone has it",
        lambda c: optim_state_dict_to_load(
            c.model, c.optimizer, optim_state_dict(c.model, c.optimizer, config=CONFIGS["sharded"]), config=RANK_0
        ),
    ),
}


def _alone() -> Any:
    class Alone:
        pass

    group: Any = Alone()
    return group


def _check_refused() -> None:
    model, optimizer = _trained("AdamW")
    state = optim_state_dict(model, optimizer)
    before = all_values(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_process_group_ranks", lambda _: [0])
        for message, call in REFUSED.values():
            with pytest.raises(ConfigError, match=message):
                call(_Case(model, optimizer, state))
    wrong = _with(state, "first.bias", "exp_avg", torch.ones(3)) if dist.get_rank() == 0 else {}
    with pytest.raises(ConfigError, match=r"'exp_avg' of first.bias has shape \(3,\)"):
        optim_state_dict_to_load(model, optimizer, wrong, config=RANK_0)
    groups = state["param_groups"]
    for not_sent in ([{**groups[0], "schedule": lambda: 1}, *groups[1:]], [{"lr": 0.1}]):
        with pytest.raises(ConfigError, match="the first rank cannot send the state dict"):
            optim_state_dict_to_load(model, optimizer, {**state, "param_groups": not_sent}, config=RANK_0)
    with full_params(model), pytest.raises(ConfigError, match=r"held in full already"):
        optim_state_dict(model, optimizer)
    assert_same(all_values(model, optimizer), before)
    optimizer.state[model.second.bias]["step"] += dist.get_rank()
    with pytest.raises(RankMismatchError, match="optimizer state") as caught:
        optim_state_dict(model, optimizer)
    if dist.get_rank() == 1:
        assert "second.bias: step is torch.float32 () 3.0, and on the first rank" in str(caught.value)
    optimizer.state[model.second.bias]["step"] -= dist.get_rank()
    if dist.get_rank() == 1:
        del optimizer.state[model.second.bias]
    with pytest.raises(RankMismatchError):
        optim_state_dict(model, optimizer)


def test_what_does_not_fit_is_refused_by_name_on_all_ranks_and_nothing_changes() -> None:
    run_ranks(_check_refused)


def _check_other_layouts() -> None:
    model, optimizer = _trained("AdamW")
    mesh = units(model)[0].policy.mesh
    weight = model.second.weight
    whole_value = whole(optimizer.state[weight]["exp_avg"])
    replicated = distribute_tensor(whole_value, mesh, [Replicate()])
    optimizer.state[weight]["exp_avg"] = replicated
    with pytest.raises(ConfigError, match=r"not laid out as its parameter(.|\n)*'exp_avg' of second.weight"):
        optim_state_dict(model, optimizer)
    state = optim_state_dict(model, optimizer, config=ShardedOptimStateDictConfig())
    optim_state_dict_to_load(model, optimizer, state, load_directly=True)
    assert optimizer.state[weight]["exp_avg"].placements == weight.placements
    assert torch.equal(whole(optimizer.state[weight]["exp_avg"]), whole_value)


@pytest.mark.long
def test_state_that_is_laid_out_otherwise() -> None:
    run_ranks(_check_other_layouts)


def _check_made_before() -> None:
    """An optimizer with state that was made of the plain model, which its first compiled call shards."""
    torch.manual_seed(0)
    model, reference = nn.Linear(6, 7), nn.Linear(6, 7)
    reference.load_state_dict(model.state_dict())
    optimizers = [optim.AdamW(each.parameters(), lr=0.1) for each in (model, reference)]
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    for each, optimizer in zip((model, reference), optimizers, strict=True):
        each(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    compiled = compile_eagerly(model)
    compiled(batch)
    state = optim_state_dict(compiled, optimizers[0])
    assert list(state["state"]) == ["weight", "bias"], "names are the plain model's"
    expected = rekey_optim_state_dict(optimizers[1].state_dict(), OptimStateKeyType.PARAM_NAME, reference)
    assert_same(_tensors(state), _tensors(expected))
    fresh = optim.AdamW(compiled.parameters(), lr=0.1)
    optim_state_dict_to_load(compiled, fresh, expected, load_directly=True)
    for each, optimizer in ((compiled, fresh), (reference, optimizers[1])):
        each(batch).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(whole(model.weight), reference.weight)


@pytest.mark.long
def test_state_made_before_sharding_and_state_of_one_process() -> None:
    run_ranks(_check_made_before)
