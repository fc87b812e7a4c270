"""Optimizer state by names, full or sharded, saved and loaded: `optim_state_dict` and `optim_state_dict_to_load`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    LocalOptimStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_compile.errors import ConfigError, RankMismatchError
from fsdp_compile.optim.flat_step import flat_step
from fsdp_compile.optim.whole_step import whole_step
from fsdp_compile.state import optim_state as older
from fsdp_compile.state.optim_names import rekey_optim_state_dict
from fsdp_compile.state.optim_state import optim_state_dict, optim_state_dict_to_load
from tests import long
from tests.fsdp2.models import assert_same, batch, local, made, sharded, train
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import whole

NAMES, NUMBERS = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID
RANK_0 = FullOptimStateDictConfig(rank0_only=True)
CONFIGS: dict[str, OptimStateDictConfig | None] = {
    "by default": None,
    "full": FullOptimStateDictConfig(offload_to_cpu=False),
    "of rank 0": RANK_0,
    "sharded": ShardedOptimStateDictConfig(offload_to_cpu=False),
    "sharded, on the host": ShardedOptimStateDictConfig(),
}
OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "AdamW": (lambda groups: optim.AdamW(groups, lr=0.05, amsgrad=True), lambda optimizer: optimizer),
    "flat AdamW": (lambda groups: optim.AdamW(groups, lr=0.05), flat_step),
    "whole Adafactor": (lambda groups: optim.Adafactor(groups, lr=0.05), whole_step),
}
"""How to make each, and what to make of it where the model is sharded."""


def _optimizer_of(model: Any, name: str = "AdamW") -> optim.Optimizer:
    """Two groups with settings of their own, in another order than the model's, and on each rank."""
    first = [model.blocks[1].up.weight, model.frozen, *model.blocks[0].parameters()]
    known = {id(p) for p in first}
    others = [p for p in model.parameters() if id(p) not in known and p is not model.scale]
    if dist.is_initialized() and dist.get_rank() == 1:
        first, others = first[::-1], others[::-1]
    make, change = OPTIMIZERS[name]
    optimizer = make([{"params": first, "lr": 0.01}, {"params": others}])
    return change(optimizer) if isinstance(model.frozen, DTensor) else optimizer


def _trained(name: str = "AdamW", shape: tuple[int, ...] = (2,)) -> tuple[Any, optim.Optimizer]:
    model = sharded(shape=shape)
    optimizer = _optimizer_of(model, name)
    train(model, optimizer)
    return model, optimizer


def _states(model: Any, optimizer: optim.Optimizer) -> dict[str, Any]:
    """The state of each parameter, full, by name."""
    names = {p: name for name, p in model.state_dict(keep_vars=True).items() if not name.startswith("last.weight")}
    held = sorted((names[p], state) for p, state in optimizer.state.items())
    return {name: {key: copy.deepcopy(whole(state[key])) for key in sorted(state)} for name, state in held}


def _settings(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**group, "params": sorted(group["params"])} for group in state["param_groups"]]


def _assert_is_of_one_process(state: dict[str, Any], name: str) -> None:
    """Keys, shapes, dtypes and groups of a full state dict are those of one process; so are values, up to sums."""
    reference = made()
    optimizer = _optimizer_of(reference, name)
    train(reference, optimizer)
    expected = rekey_optim_state_dict(optimizer.state_dict(), NAMES, reference, optim=optimizer)
    assert _settings(state) == _settings(expected)
    assert state["state"].keys() == expected["state"].keys()
    assert {"frozen", "unread"} == {n for n, _ in reference.named_parameters()} - {"scale"} - state["state"].keys()
    for key, values in expected["state"].items():
        for kind, value in values.items():
            mine = state["state"][key][kind]
            assert type(mine) is torch.Tensor
            assert mine.dtype == value.dtype
            torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-5, msg=f"{kind} of {key}")


@long.parametrize(
    ("name", "shape"),
    [("AdamW", (2,)), ("flat AdamW", (2,)), ("whole Adafactor", (2,)), ("AdamW", (2, 2)), ("AdamW", (3,))],
    always=[("AdamW", (2,))],
)
@on_ranks(world_size=lambda shape, **_: torch.Size(shape).numel())
def test_state_of_every_kind_comes_back_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    """Ranks list parameters in other orders."""
    model, optimizer = _trained(name, shape)
    expected = _states(model, optimizer)
    saved = {kind: optim_state_dict(model, optimizer, config=config) for kind, config in CONFIGS.items()}
    for kind in ("by default", "full"):
        _assert_is_of_one_process(saved[kind], name)
    assert bool(saved["of rank 0"]) == (dist.get_rank() == 0)
    for kind in ("sharded", "sharded, on the host"):
        assert saved[kind]["param_groups"] == saved["full"]["param_groups"]
        for key, values in saved[kind]["state"].items():
            for what, value in values.items():
                is_split = isinstance(value, torch.Tensor) and value.dim() > 0 and what != "step"
                assert isinstance(value, DTensor) == is_split, (key, what)
    train(model, optimizer)  # what was saved is memory of its own
    goes_on = _states(model, optimizer)
    for kind, config in CONFIGS.items():
        resumed = sharded(1, shape)
        other = _optimizer_of(resumed, name)
        loaded = optim_state_dict_to_load(resumed, other, saved[kind], config=config)
        assert not other.state, "it is not changed yet"
        other.load_state_dict(loaded)
        assert_same(_states(resumed, other), expected)
        for parameter, state in other.state.items():
            for value in state.values():
                if isinstance(value, DTensor) and value.shape == parameter.shape:
                    assert value.placements == parameter.placements  # type: ignore[attr-defined]
                    assert local(value).shape == local(parameter).shape
    resumed = sharded(0, shape)
    other = _optimizer_of(resumed, name)
    train(resumed, other)  # to the same parameters
    optim_state_dict_to_load(resumed, other, saved["of rank 0"], load_directly=True, config=RANK_0)
    train(resumed, other)
    assert_same(_states(resumed, other), goes_on)


def _save(name: str) -> dict[str, Any]:
    return optim_state_dict(*_trained(name))


def _load(name: str, shape: tuple[int, ...], saved: dict[str, Any]) -> None:
    model = sharded(shape=shape)
    for config in (None, RANK_0):
        optimizer = _optimizer_of(model, name)
        given = saved if config is None or dist.get_rank() == 0 else {}
        optim_state_dict_to_load(model, optimizer, given, load_directly=True, config=config)
        again = optim_state_dict(model, optimizer, config=config)
        if given:
            assert_same(again["state"], saved["state"])
        else:
            assert not again


@long.parametrize("shape", [(1,), (3,), (2, 2)], always=[(3,)])
def test_full_state_is_loaded_by_any_number_of_ranks(shape: tuple[int, ...]) -> None:
    saved = run_ranks(_save, "flat AdamW")[0]
    run_ranks(_load, "flat AdamW", shape, saved, world_size=torch.Size(shape).numel())


@on_ranks()
def test_torchs_own_state_dicts_and_checkpoints_load_and_are_loaded(tmp_path: Path) -> None:
    """Of torch's functions, which need the same order of parameters on all ranks, and through DCP."""
    model = sharded()
    parameters = [p for p in model.parameters() if p is not model.scale]
    optimizer = optim.AdamW(parameters, lr=0.05)
    train(model, optimizer)
    state = optim_state_dict(model, optimizer, config=ShardedOptimStateDictConfig())
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path)
    other = optim.AdamW(parameters)
    into = {"optimizer": copy.deepcopy(state)}
    for values in into["optimizer"]["state"].values():
        for value in values.values():
            local(value).zero_()
    dcp.load(into, checkpoint_id=tmp_path)
    optim_state_dict_to_load(model, other, into["optimizer"], load_directly=True)
    assert_same(_states(model, other), _states(model, optimizer))
    options = StateDictOptions(full_state_dict=True, strict=False)
    third = optim.AdamW(parameters)
    set_optimizer_state_dict(model, third, optim_state_dict(model, optimizer), options=options)
    found = _states(model, third)
    expected = _states(model, optimizer)
    assert_same({name: found[name] for name in expected}, expected)
    of_torch = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=False))
    fourth = optim.AdamW(parameters)
    optim_state_dict_to_load(model, fourth, of_torch, load_directly=True)
    assert_same(_states(model, fourth), expected)


@on_ranks()
def test_full_state_on_all_ranks_is_cut_without_communication() -> None:
    model, optimizer = _trained()
    full = optim_state_dict(model, optimizer)
    with CommDebugMode() as mode:
        optim_state_dict_to_load(model, optimizer, full, load_directly=True)
    assert mode.get_total_counts() == 0


@on_ranks()
def test_groups_are_matched_by_their_parameters() -> None:
    model, optimizer = _trained()
    schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    schedule.step()
    state = optim_state_dict(model, optimizer)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    other = optim.AdamW([{"params": groups[1][::-1]}, {"params": groups[0]}], lr=1.0, amsgrad=True)
    optim_state_dict_to_load(model, other, state, load_directly=True)
    assert [group["lr"] for group in other.param_groups] == [0.025, 0.005]
    assert [group["initial_lr"] for group in other.param_groups] == [0.05, 0.01]
    assert_same(_states(model, other), _states(model, optimizer))
    every = [p for p in model.parameters() if p is not model.scale]
    with pytest.raises(ConfigError, match=r"group 0 were saved in several groups, whose settings differ"):
        optim_state_dict_to_load(model, optim.AdamW(every), state)
    part = optim.AdamW([model.first.weight], lr=1.0)
    optim_state_dict_to_load(model, part, state, load_directly=True)
    assert part.param_groups[0]["lr"] == 0.025
    assert list(part.state) == [model.first.weight]
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    with_names = optim.AdamW(named, lr=0.1)
    train(model, with_names)
    backwards = optim.AdamW([{"params": named[::-1], "lr": 0.2}])
    optim_state_dict_to_load(model, backwards, optim_state_dict(model, with_names), load_directly=True)
    assert backwards.param_groups[0]["param_names"] == [name for name, _ in named[::-1]]
    assert backwards.param_groups[0]["lr"] == 0.1


@on_ranks()
def test_missing_tied_nested_and_user_defined_state() -> None:
    model, optimizer = _trained()
    bias = model.last.bias
    optimizer.state["mine"] = {"seen": torch.arange(3), "note": "kept"}  # type: ignore[index]
    optimizer.state[bias]["shampoo"] = {"factors": [torch.ones(2, 2), None]}
    state = optim_state_dict(model, optimizer)
    assert "last.weight" not in state["state"], "a tied parameter has its first name"
    del state["state"]["blocks.0.up.bias"]
    renamed = copy.deepcopy(state)
    renamed["state"]["last.weight"] = renamed["state"].pop("first.weight")
    for config in (None, RANK_0):
        for given in (state, renamed):
            other = _optimizer_of(model)
            optim_state_dict_to_load(model, other, given, load_directly=True, config=config)
            mine: Any = other.state["mine"]  # type: ignore[index]
            assert torch.equal(mine["seen"], torch.arange(3))
            assert mine["note"] == "kept"
            assert torch.equal(other.state[bias]["shampoo"]["factors"][0], torch.ones(2, 2))
            assert model.blocks[0].up.bias not in other.state
            assert_same(other.state[model.first.weight], optimizer.state[model.first.weight])
    for config in (None, RANK_0):
        loaded = optim_state_dict_to_load(model, optimizer, {"state": state["state"]}, config=config)
        assert "param_groups" not in loaded
    only_state = optim_state_dict(model, optimizer, {"state": optimizer.state_dict()["state"]})
    assert set(only_state) == {"state"}
    by_name = optim_state_dict(model, optimizer, optim_state_dict(model, optimizer, config=CONFIGS["sharded"]))
    assert torch.equal(by_name["state"]["last.bias"]["exp_avg"], whole(optimizer.state[bias]["exp_avg"]))
    replicated = distribute_tensor(whole(optimizer.state[bias]["exp_avg"]), bias.device_mesh, [Replicate()])
    sharded_state = optim_state_dict(model, optimizer, config=CONFIGS["sharded"])
    sharded_state["state"]["last.bias"]["exp_avg"] = replicated
    other = _optimizer_of(model)
    optim_state_dict_to_load(model, other, sharded_state, load_directly=True)
    assert other.state[bias]["exp_avg"].placements == bias.placements
    assert torch.equal(whole(other.state[bias]["exp_avg"]), whole(replicated))


def _with(state: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    bias = {**state["state"]["last.bias"], key: value}
    return {**state, "state": {**state["state"], "last.bias": bias}}


Call = Callable[[Any, optim.Optimizer, dict[str, Any]], Any]
REFUSED: dict[str, Call] = {
    r"numbers parameters(.|\n)*rekey_optim_state_dict": lambda m, o, _: optim_state_dict_to_load(m, o, o.state_dict()),
    r"has no 'state'(.|\n)*rank0_only=True": lambda m, o, _: optim_state_dict_to_load(m, o, {}),
    r"'exp_avg' of last.bias has shape \(3,\), and the parameter \(6,\)": lambda m, o, state: optim_state_dict_to_load(
        m, o, _with(state, "exp_avg", torch.ones(3))
    ),
    r"'exp_avg' of last.bias is on the meta device": lambda m, o, state: optim_state_dict_to_load(
        m, o, _with(state, "exp_avg", torch.ones(6, device="meta"))
    ),
    r"third.weight is not in the model": lambda m, o, state: optim_state_dict_to_load(
        m, o, {**state, "param_groups": [{"params": ["third.weight"]}]}
    ),
    r"keys of types \['int', 'str'\]": lambda m, o, _: optim_state_dict_to_load(m, o, {"state": {0: {}, "frozen": {}}}),
    r"LocalOptimStateDictConfig(.|\n)*to_local\(\)": lambda m, o, _: optim_state_dict(
        m, o, config=LocalOptimStateDictConfig()
    ),
    r"state of parameter 99": lambda m, o, _: optim_state_dict(m, o, {"state": {99: {}}}),
    r"group 0 has a parameter of shape \(2, 2\) that the model does not have": lambda m, _, __: optim_state_dict(
        m, optim.SGD([nn.Parameter(torch.ones(2, 2))])
    ),
    r"nothing in this model is sharded(.|\n)*fully_shard": lambda _, o, __: optim_state_dict(nn.Linear(2, 2), o),
    r"is a DTensor, and the first rank alone has it": lambda m, o, _: optim_state_dict_to_load(
        m, o, optim_state_dict(m, o, config=CONFIGS["sharded"]), config=RANK_0
    ),
}


@on_ranks(timeout_s=60)
def test_what_does_not_fit_is_refused_by_name_on_all_ranks_and_nothing_changes() -> None:
    model, optimizer = _trained()
    state = optim_state_dict(model, optimizer)
    before = _states(model, optimizer)
    for message, call in REFUSED.items():
        with pytest.raises(ConfigError, match=message):
            call(model, optimizer, state)
    wrong = _with(state, "exp_avg", torch.ones(3)) if dist.get_rank() == 0 else {}
    with pytest.raises(ConfigError, match=r"'exp_avg' of last.bias has shape \(3,\)"):
        optim_state_dict_to_load(model, optimizer, wrong, config=RANK_0)
    groups = state["param_groups"]
    for not_sent in ([{**groups[0], "schedule": lambda: 1}, *groups[1:]], [{"lr": 0.1}]):
        with pytest.raises(ConfigError, match="the first rank cannot send the state dict"):
            optim_state_dict_to_load(model, optimizer, {**state, "param_groups": not_sent}, config=RANK_0)
    assert_same(_states(model, optimizer), before)
    optimizer.state[model.last.bias]["step"] += dist.get_rank()
    said = "another rank" if dist.get_rank() == 0 else r"'step' of last.bias is torch.float32 3.0, and on .* 2.0"
    with pytest.raises(RankMismatchError, match=f"different optimizer state: {said}"):
        optim_state_dict(model, optimizer)
    optimizer.state[model.last.bias]["step"] -= dist.get_rank()
    if dist.get_rank() == 1:
        del optimizer.state[model.last.bias]
    with pytest.raises(RankMismatchError):
        optim_state_dict(model, optimizer)
    model.blocks[0].register_forward_hook(lambda *_: optim_state_dict(model, optimizer))
    with pytest.raises(ConfigError, match=r"optim_state_dict\(\) in a forward"):
        model(batch())


@on_ranks()
def test_older_functions_give_and_take_what_they_say() -> None:
    model, optimizer = _trained()
    expected = _states(model, optimizer)
    is_first = dist.get_rank() == 0
    with pytest.warns(FutureWarning, match=r"full_optim_state_dict is FSDP1's(.|\n)*optim_state_dict\(model"):
        of_first = older.full_optim_state_dict(model, optimizer)
    assert bool(of_first) == is_first
    with pytest.warns(FutureWarning):
        full = older.full_optim_state_dict(model, optimizer, rank0_only=False)
    with pytest.warns(FutureWarning):
        shards = older.sharded_optim_state_dict(model, optimizer)
    assert isinstance(shards["state"]["first.weight"]["exp_avg"], DTensor)
    groups = [{"params": list(group["params"])} for group in optimizer.param_groups]
    with pytest.warns(FutureWarning):
        loadable = [
            older.flatten_sharded_optim_state_dict(shards, model, optimizer),
            older.shard_full_optim_state_dict(full, model, optim=optimizer),
            older.shard_full_optim_state_dict(full, model, groups),
            older.scatter_full_optim_state_dict(of_first or None, model, None, optimizer),
            older.scatter_full_optim_state_dict(of_first or None, model, groups),
        ]
    for state in loadable:
        other = _optimizer_of(model)
        other.load_state_dict(state)
        assert_same(_states(model, other), expected)
    in_order = optim.AdamW(model.parameters(), lr=0.3)
    train(model, in_order)
    of_order = optim_state_dict(model, in_order)
    for given in (None, list(model.parameters())):
        with pytest.warns(FutureWarning):
            state = older.shard_full_optim_state_dict(of_order, model, given)
        other = optim.AdamW(model.parameters())
        other.load_state_dict(state)
        assert_same(_states(model, other), _states(model, in_order))
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match=r"optim_input has \['int'\]"):
        older.shard_full_optim_state_dict(full, model, [1])  # type: ignore[arg-type]


def test_names_become_numbers_for_one_process_and_back() -> None:
    """The plain optimizer has its groups in another order, and fewer parameters."""
    state = run_ranks(_save, "AdamW")[0]
    plain = made()
    groups = [{"params": list(plain.last.parameters())}, {"params": [plain.frozen, plain.blocks[1].up.weight]}]
    optimizer = optim.AdamW(groups, lr=1.0)
    numbered = rekey_optim_state_dict(state, NUMBERS, plain, optim=optimizer)
    assert set(numbered["state"]) == {0, 1, 3}, "the frozen one has no state"
    optimizer.load_state_dict(numbered)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
    for name, parameter in plain.named_parameters():
        if parameter in optimizer.state:
            assert_same(optimizer.state[parameter], state["state"][name])
    named = rekey_optim_state_dict(numbered, NAMES, plain, optim=optimizer)
    assert named["state"].keys() == {"first.weight", "last.bias", "blocks.1.up.weight"}
    assert rekey_optim_state_dict(named, NAMES, plain) == named
    everything = optim.AdamW(plain.parameters())
    by_order = rekey_optim_state_dict(everything.state_dict(), NAMES, plain)
    assert by_order["param_groups"][0]["params"] == [name for name, _ in plain.named_parameters()]
    with pytest.warns(FutureWarning, match="optim_input is deprecated"):
        assert rekey_optim_state_dict(everything.state_dict(), NAMES, plain, plain.parameters()) == by_order
    assert rekey_optim_state_dict(by_order, NUMBERS, plain) == everything.state_dict()


def test_rekeying_refuses_what_would_mix_parameters_up() -> None:
    plain = made()
    state = optim.AdamW(plain.parameters()).state_dict()
    with pytest.raises(ConfigError, match=r"groups of \[\d+\] parameters were saved, and the optimizer's are of \[1\]"):
        rekey_optim_state_dict(state, NAMES, plain, optim=optim.AdamW([plain.scale]))
    with pytest.raises(ConfigError, match="does not have other"):
        rekey_optim_state_dict({"state": {}, "param_groups": [{"params": ["other"]}]}, NUMBERS, plain)
    with pytest.raises(ConfigError, match=r"types \['int', 'str'\]"):
        rekey_optim_state_dict({"state": {0: {}, "scale": {}}}, NUMBERS, plain)
    with pytest.raises(ConfigError, match="PARAM_NAME or PARAM_ID"):
        rekey_optim_state_dict(state, "names", plain)  # type: ignore[arg-type]


class _Named(optim.SGD):
    """An optimizer whose state dicts have names, as those of torchrec's `KeyedOptimizer`."""

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        super().__init__(named.values(), lr=0.1, momentum=0.9)
        self.names = list(named)

    def state_dict(self) -> dict[str, Any]:
        return _renamed(super().state_dict(), dict(enumerate(self.names)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(_renamed(state_dict, {name: number for number, name in enumerate(self.names)}))


def _renamed(state: dict[str, Any], keys: dict[Any, Any]) -> dict[str, Any]:
    groups = [{**group, "params": [keys[key] for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {keys[key]: held for key, held in state["state"].items()}, "param_groups": groups}


@on_ranks()
def test_optimizers_with_names_keep_the_state_of_what_was_not_saved() -> None:
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3)))
    optimizer = _Named(dict(model.named_parameters()))
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    state = optim_state_dict(model, optimizer)
    expected = _states(model, optimizer)
    optimizer.step()
    del state["state"]["1.bias"]
    later = _states(model, optimizer)
    optim_state_dict_to_load(model, optimizer, state, is_named_optimizer=True, load_directly=True)
    assert_same(_states(model, optimizer), {**expected, "1.bias": later["1.bias"]})
