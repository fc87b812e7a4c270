"""`fully_shard([a, b])`: one unit of several modules, as with FSDP2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

import fsdp_compile
from fsdp_compile import fully_shard, units
from tests import long
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess, close


class _Headed(nn.Module):
    """A block, and a norm and a head that are one unit; `hidden` runs without the head."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(6, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, *, hidden: bool = False) -> torch.Tensor:
        x = self.norm(torch.tanh(self.block(x)))
        return x if hidden else self.head(x)


def test_one_unit_with_the_names_of_its_modules(fake_world: Callable[..., Any]) -> None:
    with fake_world(2):
        model: Any = _Headed()
        listed = [model.norm, model.head]
        assert fully_shard(listed) is listed
        fully_shard(model)
        assert [isinstance(part, FSDPModule) for part in model.modules()] == [True, False, True, True]
        named = {u.title: sorted(p.name for group in u.groups for p in group.params) for u in units(model)}
        assert named == {
            "(root)": ["block.bias", "block.weight"],
            "norm+head": ["head.bias", "head.weight", "norm.bias", "norm.weight"],
        }
        model.head.unshard()  # the unit of both
        assert not isinstance(model.norm.weight, DTensor)
        assert isinstance(model.block.weight, DTensor)
        model.norm.reshard()
        assert isinstance(model.head.weight, DTensor)


def test_modules_in_others_of_the_list_are_theirs(fake_world: Callable[..., Any]) -> None:
    with fake_world(2):
        model: Any = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
        fully_shard([model[0], model[0][0], model[1], model[1]])
        assert [isinstance(part, FSDPModule) for part in model.modules()] == [False, True, False, True]
        fully_shard(model)
        assert [sum(len(group.params) for group in unit.groups) for unit in units(model)] == [0, 4]


def test_a_list_of_one_is_one_unit_and_is_not_split(fake_world: Callable[..., Any]) -> None:
    with fake_world(2):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)])
        fully_shard([model])
        assert [isinstance(part, FSDPModule) for part in model.modules()] == [True, *[False] * 9]


def _shard(model: Any) -> None:
    fully_shard([model.norm, model.head])
    fully_shard(model)  # FSDP2 wants one outermost module


@long.parametrize("compiled", [False, True], always=[True])
@on_ranks()
def test_training_equals_one_process(*, compiled: bool) -> None:
    how = Run.SHARDED if compiled else Run.EAGER
    adam = functools.partial(torch.optim.Adam, lr=0.05, eps=1e-3)
    pair = WithOneProcess(_Headed, how, _shard, optimizer=adam, twice=False)
    for _ in range(3):
        # As a chunked loss: the head is called by itself for each part of the rows.
        mine, batch = pair.next_batch()
        hidden, theirs = pair.call(mine, hidden=True), pair.reference(batch, hidden=True)
        sum(pair.model.head(chunk).square().sum() for chunk in hidden.chunk(2)).backward()
        (pair.reference.head(theirs).square().sum() / 2).backward()
        pair.train(steps=1)
    state = {name: value.full_tensor() for name, value in pair.model.state_dict().items()}
    for name, value in pair.reference.state_dict().items():
        close(state[name], value, name)
    with fsdp_compile.full_params(pair.model.head, recurse=False):  # the unit's, where the module has them
        close(pair.model.head.weight, pair.reference.head.weight, "full")


@on_ranks()
def test_each_module_casts_its_own_inputs_and_output() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    outputs = []
    for shard in (fsdp2, fully_shard):
        torch.manual_seed(0)
        model: Any = _Headed()
        shard([model.norm, model.head], mp_policy=policy)
        shard(model)
        outputs.append(model(torch.ones(2, 6)))
    assert outputs[0].dtype is torch.float64
    assert torch.equal(*outputs)
