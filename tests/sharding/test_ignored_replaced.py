"""Ignored parameters stay ignored where a model on meta, or a checkpoint, gives them other objects."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, fully_shard, materialize
from tests.ranks import run_ranks


def _replace(model: nn.Module, way: str) -> None:
    if way == "materialize":
        materialize(model)
    elif way == "to_empty":
        model.to_empty(device="cpu")
    else:
        model.load_state_dict({n: torch.ones_like(t) for n, t in model.state_dict().items()}, assign=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)


def _check(way: str, *, is_compiled: bool) -> None:
    with torch.device("cpu" if way == "assign" else "meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, ignored_params=[model[1]])
    before = model[1].weight
    _replace(model, way)
    assert model[1].weight is not before
    whole = nn.Sequential(model)
    fully_shard(whole)
    assert not isinstance(model[1].weight, DTensor), "nor sharded by a call on a module above"
    called = torch.compile(whole, backend="fsdp", options={"lower": "eager"}) if is_compiled else whole
    called(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in whole.parameters())
    model[0].extra = nn.Parameter(torch.ones(4))
    with pytest.raises(ConfigError, match="was added to a module after it was sharded"):
        whole(torch.ones(2, 4))


@pytest.mark.parametrize("way", ["materialize", "to_empty", "assign"])
def test_new_objects_of_ignored_parameters_are_ignored(way: str) -> None:
    run_ranks(_check, way, is_compiled=way != "to_empty")
