"""A sharded model's own `state_dict()` and `load_state_dict()`: names, strictness, shapes, collectives."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_compile import full_tensors, optim_state_dict
from tests.ranks import on_ranks
from tests.state.optim_models import assert_same, kinds, optimizer_of, sharded, train
from tests.two_sides import compile_eagerly, whole

State = dict[str, Any]


def _values(model: nn.Module) -> State:
    return {name: value.clone() for name, value in full_tensors(model)}


def _raised(state: State, *names: str) -> State:
    """A copy in which some values, or all floating ones, are larger by one."""
    chosen = names or [name for name, value in state.items() if value.is_floating_point()]
    return {name: copy.deepcopy(value) + (name in chosen) for name, value in state.items()}


@on_ranks()
def test_names_are_the_plain_models_with_and_without_compile() -> None:
    plain, model = kinds(), sharded()
    compiled: Any = compile_eagerly(model)
    optimizer = optimizer_of(model, "AdamW")
    train(model, optimizer)
    expected = list(plain.state_dict())
    assert list(model.state_dict()) == expected
    assert "tied.weight" in expected
    assert "scratch" not in expected
    assert [name for name, _ in full_tensors(compiled)] == expected
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        found = get_model_state_dict(compiled, options=options)
        assert set(found) == set(expected)
        set_model_state_dict(compiled, found, options=options)
    names = [list(optim_state_dict(each, optimizer)["state"]) for each in (model, compiled)]
    assert names[0] == names[1]
    assert set(names[0]) < {name for name, _ in plain.named_parameters()}
    # DCP's are in the optimizer's order.
    assert set(get_optimizer_state_dict(compiled, optimizer)["state"]) == set(names[0])
    set_model_state_dict(compiled, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
    assert_same(_values(compiled), plain.state_dict())


@on_ranks()
def test_shards_are_saved_and_loaded_without_communication_whatever_is_gathered() -> None:
    model = sharded()
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    expected = _values(model)
    for _ in range(2):
        with CommDebugMode() as mode:
            state = model.state_dict()
        assert mode.get_total_counts() == 0
        parameters = dict(nn.Module.named_parameters(model, remove_duplicate=False))
        for name, value in state.items():
            assert isinstance(value, DTensor) == (name in parameters and name not in ("ignored", "scale")), name
            assert torch.equal(whole(value), expected[name]), name
        model.unshard()
    # What is gathered meanwhile is not what the next forward reads.
    model.eval()
    reference = kinds().eval()
    raised = _raised(reference.state_dict())
    with CommDebugMode() as mode:
        model.load_state_dict(_raised(state))
    assert mode.get_total_counts() == 0
    reference.load_state_dict(raised)
    torch.testing.assert_close(model(batch), reference(batch), rtol=2e-2, atol=2e-2)  # one layer is bfloat16
