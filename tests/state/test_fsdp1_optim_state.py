"""FSDP1's older functions for optimizer state, names and numbers of parameters, and optimizers that use names."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.tensor import DTensor

import fsdp_compile
from fsdp_compile import ConfigError, fully_shard, optim_state_dict, optim_state_dict_to_load, rekey_optim_state_dict
from tests.ranks import run_ranks
from tests.state.optim_models import all_values, assert_same, kinds, optimizer_of, sharded, train

NAMES, NUMBERS = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID


def _of_optimizer(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not key.startswith("model")}


def _check_older_functions() -> None:
    model = sharded()
    optimizer = optimizer_of(model, "AdamW")
    train(model, optimizer)
    expected = _of_optimizer(all_values(model, optimizer))
    is_first = dist.get_rank() == 0
    with pytest.warns(FutureWarning, match=r"full_optim_state_dict is FSDP1's(.|\n)*optim_state_dict\(model"):
        of_first = fsdp_compile.full_optim_state_dict(model, optimizer)
    assert bool(of_first) == is_first
    with pytest.warns(FutureWarning):
        full = fsdp_compile.full_optim_state_dict(model, optimizer, rank0_only=False)
    with pytest.warns(FutureWarning):
        shards = fsdp_compile.sharded_optim_state_dict(model, optimizer)
    assert isinstance(shards["state"]["first.weight"]["exp_avg"], DTensor)
    groups = [{"params": list(group["params"])} for group in optimizer.param_groups]
    with pytest.warns(FutureWarning):
        loadable = {
            "sharded": fsdp_compile.flatten_sharded_optim_state_dict(shards, model, optimizer),
            "full": fsdp_compile.shard_full_optim_state_dict(full, model, optim=optimizer),
            "full, by input": fsdp_compile.shard_full_optim_state_dict(full, model, groups),
            "scattered": fsdp_compile.scatter_full_optim_state_dict(
                of_first if is_first else None, model, None, optimizer
            ),
            "scattered, by input": fsdp_compile.scatter_full_optim_state_dict(of_first or None, model, groups),
        }
    for name, state in loadable.items():
        other = optimizer_of(model, "AdamW")
        other.load_state_dict(state)
        found = _of_optimizer(all_values(model, other))
        if "input" in name:  # which says nothing about settings but those that were saved
            assert found.keys() == expected.keys(), name
        assert_same(found, expected)
    in_order = optim.AdamW(model.parameters(), lr=0.3)
    train(model, in_order)
    of_order = optim_state_dict(model, in_order)
    with pytest.warns(FutureWarning):
        by_order = fsdp_compile.shard_full_optim_state_dict(of_order, model)
    with pytest.warns(FutureWarning):
        by_list = fsdp_compile.shard_full_optim_state_dict(of_order, model, list(model.parameters()))
    for state in (by_order, by_list):
        other = optim.AdamW(model.parameters())
        other.load_state_dict(state)
        assert_same(_of_optimizer(all_values(model, other)), _of_optimizer(all_values(model, in_order)))
    with pytest.warns(FutureWarning, match="optim_input is deprecated"):
        fsdp_compile.shard_full_optim_state_dict(full, model, groups)
    with pytest.warns(FutureWarning), pytest.raises(ConfigError, match=r"optim_input has \['int'\]"):
        fsdp_compile.shard_full_optim_state_dict(full, model, [1])  # type: ignore[arg-type]


def test_older_functions_give_and_take_what_they_say() -> None:
    run_ranks(_check_older_functions)


def _check_to_one_process() -> dict[str, Any]:
    model = sharded()
    optimizer = optimizer_of(model, "AdamW")
    train(model, optimizer)
    return optim_state_dict(model, optimizer)


@pytest.mark.long
def test_names_become_numbers_for_one_process_and_back() -> None:
    """The plain optimizer has its groups in another order, and fewer parameters."""
    state = run_ranks(_check_to_one_process)[0]
    plain = kinds()
    optimizer = optim.AdamW(
        [
            {"params": [p for name, p in plain.named_parameters() if name.startswith("second")]},
            {"params": [plain.scale, plain.frozen]},
        ],
        lr=1.0,
    )
    numbered = rekey_optim_state_dict(state, NUMBERS, plain, optim=optimizer)
    assert set(numbered["state"]) == {0, 1, 2}, "the frozen one has no state"
    optimizer.load_state_dict(numbered)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
    for name, parameter in plain.named_parameters():
        if parameter in optimizer.state:
            assert_same(optimizer.state[parameter], state["state"][name])
    named = rekey_optim_state_dict(numbered, NAMES, plain, optim=optimizer)
    assert named["state"].keys() == {"second.weight", "second.bias", "scale"}
    assert named["param_groups"][1]["params"] == ["scale", "frozen"]
    assert rekey_optim_state_dict(named, NAMES, plain) == named
    assert rekey_optim_state_dict(numbered, NUMBERS, plain) == numbered
    everything = optim.AdamW(plain.parameters())
    by_order = rekey_optim_state_dict(everything.state_dict(), NAMES, plain)
    assert by_order["param_groups"][0]["params"] == [name for name, _ in plain.named_parameters()]
    with pytest.warns(FutureWarning, match="optim_input is deprecated"):
        assert rekey_optim_state_dict(everything.state_dict(), NAMES, plain, plain.parameters()) == by_order
    assert rekey_optim_state_dict(by_order, NUMBERS, plain) == everything.state_dict()


def test_rekeying_refuses_what_would_mix_parameters_up() -> None:
    plain = kinds()
    optimizer = optim.AdamW(plain.parameters())
    state = optimizer.state_dict()
    smaller = optim.AdamW([plain.scale])
    with pytest.raises(ConfigError, match=r"groups of \[\d+\] parameters were saved, and the optimizer's are of \[1\]"):
        rekey_optim_state_dict(state, NAMES, plain, optim=smaller)
    with pytest.raises(ConfigError, match="does not have other"):
        rekey_optim_state_dict({"state": {}, "param_groups": [{"params": ["other"]}]}, NUMBERS, plain)
    with pytest.raises(ConfigError, match=r"types \['int', 'str'\]"):
        rekey_optim_state_dict({"state": {0: {}, "scale": {}}}, NUMBERS, plain)
    with pytest.raises(ConfigError, match="PARAM_NAME or PARAM_ID"):
        rekey_optim_state_dict(state, "names", plain)  # type: ignore[arg-type]


class _Named(optim.SGD):
    """An optimizer whose state dicts have names, as those of torchrec's `KeyedOptimizer`."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__(named.values(), lr=0.1, momentum=0.9)
        self.names = list(named)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {
            "state": {self.names[number]: held for number, held in state["state"].items()},
            "param_groups": [
                {**group, "params": [self.names[n] for n in group["params"]]} for group in state["param_groups"]
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        number = {name: number for number, name in enumerate(self.names)}
        super().load_state_dict(
            {
                "state": {number[name]: held for name, held in state_dict["state"].items()},
                "param_groups": [
                    {**group, "params": [number[n] for n in group["params"]]} for group in state_dict["param_groups"]
                ],
            }
        )


def _check_named() -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3)))
    optimizer = _Named(dict(model.named_parameters()))
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    state = optim_state_dict(model, optimizer)
    expected = copy.deepcopy(_of_optimizer(all_values(model, optimizer)))
    optimizer.step()
    del state["state"]["1.bias"]
    later = _of_optimizer(all_values(model, optimizer))
    optim_state_dict_to_load(model, optimizer, state, is_named_optimizer=True, load_directly=True)
    found = _of_optimizer(all_values(model, optimizer))
    kept = "momentum_buffer of 1.bias"
    assert not torch.equal(later[kept], expected[kept])
    assert_same(found, {**expected, kept: later[kept]})


def test_optimizers_with_names_keep_the_state_of_what_was_not_saved() -> None:
    run_ranks(_check_named)
