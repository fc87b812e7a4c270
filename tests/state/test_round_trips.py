"""State of model and optimizer that is saved is loaded bit for bit, also by another layout, and training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp_compile import flat_step, fully_shard, whole_step
from tests import long
from tests.fsdp2.models import assert_same, train
from tests.models.outlines import MixedKinds
from tests.pairwise import covering, pairs, pairs_of
from tests.ranks import on_ranks, run_ranks
from tests.state.drawn import AXES, all_values, contradictions, load, save, world
from tests.two_sides import compile_eagerly

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda groups: optim.AdamW(groups, lr=0.05, amsgrad=True),
    "flat AdamW": lambda groups: flat_step(optim.AdamW(groups, lr=0.05)),
    "whole Adafactor": lambda groups: whole_step(optim.Adafactor(groups, lr=0.05)),
    "SGD": lambda groups: optim.SGD(groups, lr=0.05, momentum=0.9),
}
OPTIONS = {
    "sharded": StateDictOptions(),
    "sharded, on the host": StateDictOptions(cpu_offload=True),
    "full": StateDictOptions(full_state_dict=True),
    "full, of rank 0": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


def _model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MixedKinds()


def _optimizer_of(model: Any, name: str) -> optim.Optimizer:
    """Two groups with settings of their own, in another order than the model's."""
    first = [model.scale, model.frozen, *model.norm.parameters()]
    known = {id(p) for p in first}
    others = [p for p in model.parameters() if id(p) not in known]
    return OPTIMIZERS[name]([{"params": first, "lr": 0.01}, {"params": others}])


def _assert_in_place(model: Any, optimizer: optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            is_split = isinstance(parameter, DTensor) and key != "step" and value.dim() > 0
            assert isinstance(value, DTensor) == is_split, key
    assert model.first.weight is model.tied.weight


@long.parametrize("kind", OPTIONS, always=["full, of rank 0"])
@long.parametrize("name", OPTIMIZERS, always=["flat AdamW"])
@on_ranks()
def test_states_come_back_bit_for_bit(name: str, kind: str) -> None:
    model = fully_shard(_model())
    optimizer = _optimizer_of(model, name)
    train(compile_eagerly(model), optimizer)
    expected = all_values(model, optimizer)
    options = OPTIONS[kind]
    states = get_state_dict(model, optimizer, options=options)
    is_of_rank_0 = kind == "full, of rank 0"
    if is_of_rank_0:
        assert bool(states[0]) == (dist.get_rank() == 0)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states = copy.deepcopy(states)
    resumed = fully_shard(_model(seed=1))
    resumed_optimizer = _optimizer_of(resumed, name)
    # One by one: torch's `set_state_dict` waits for ever where other ranks have no model state.
    set_model_state_dict(resumed, states[0], options=options)
    set_optimizer_state_dict(resumed, resumed_optimizer, states[1], options=options)
    assert_same(all_values(resumed, resumed_optimizer), expected)
    for each, own in ((model, optimizer), (resumed, resumed_optimizer)):
        train(compile_eagerly(each), own)
    _assert_in_place(resumed, resumed_optimizer)
    assert_same(all_values(resumed, resumed_optimizer), all_values(model, optimizer))


ROWS = covering(AXES, contradictions())
WORLDS = sorted({(world(row), world(row, " then")) for row in ROWS})


def test_every_two_values_are_in_a_row_or_contradict_each_other() -> None:
    assert set().union(*map(pairs_of, ROWS)) == pairs(AXES) - contradictions()


@long.parametrize("worlds", WORLDS, always=[(2, 1)])
def test_what_is_saved_is_loaded_by_another_layout(worlds: tuple[int, int], tmp_path: Path) -> None:
    rows = [row for row in ROWS if (world(row), world(row, " then")) == worlds]
    saved, *_ = run_ranks(save, rows, tmp_path, world_size=worlds[0])
    ends = run_ranks(load, rows, tmp_path, saved, world_size=worlds[1])
    assert [(row, said) for row, *said in zip(rows, *ends, strict=True) if any(said)] == []
