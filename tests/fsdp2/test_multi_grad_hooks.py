"""`register_multi_grad_hook` over sharded parameters: the first gradient calls it, waiting for all is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from fsdp_compile import UnsupportedModelError, fully_shard
from tests import long
from tests.beside import Beside, Run, loss_of
from tests.fake_world import fake_world
from tests.models.outlines import Small
from tests.ranks import run_ranks


def _waits_for_all(how: Run) -> None:
    pair = Beside(Small, how)
    pair.backward()
    called: list[int] = []
    for model in pair.both():
        register_multi_grad_hook(list(model.parameters()), lambda _: called.append(1))
        model.zero_grad()
    loss_of(pair.reference(torch.ones(2, 6))).backward()
    assert called == [1]
    with pytest.raises(UnsupportedModelError, match=r'(?s)would never be called.*mode="all".*after loss\.backward'):
        loss_of(pair.compiled(torch.ones(2, 6))).backward()


@long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.PLAIN], ids=lambda how: how.value)
def test_a_hook_that_waits_for_all_gradients_is_refused(how: Run) -> None:
    run_ranks(_waits_for_all, how)


def test_a_hook_from_before_sharding_is_refused_before_anything_is_changed() -> None:
    with fake_world(2):
        model = Small()
        register_multi_grad_hook(list(model.up.parameters()), lambda _: None)
        with pytest.raises(UnsupportedModelError, match=r"(?s)would never be called.*up\.weight"):
            fully_shard(model)
        assert type(model.up.weight) is nn.Parameter


def _waits_for_any(how: Run) -> None:
    pair = Beside(Small, how)
    pair.backward()
    called: dict[int, int] = {}
    for model in pair.both():

        def count(_: torch.Tensor, key: int = id(model)) -> None:
            called[key] = called.get(key, 0) + 1

        register_multi_grad_hook(list(model.parameters()), count, mode="any")
        model.zero_grad()
    for _ in range(2):
        pair.backward()
    assert called == dict.fromkeys(map(id, pair.both()), 2)


@long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.SHARDED], ids=lambda how: how.value)
def test_a_hook_for_the_first_gradient_is_called_once_in_each_backward(how: Run) -> None:
    run_ranks(_waits_for_any, how)
