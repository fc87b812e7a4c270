"""`register_multi_grad_hook` over sharded parameters: the first gradient of each backward calls it."""

from __future__ import annotations

import torch
from torch.autograd.graph import register_multi_grad_hook

from tests import long
from tests.models.outlines import Small
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess


@long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.SHARDED], ids=lambda how: how.value)
@on_ranks()
def test_a_hook_for_the_first_gradient_is_called_once_in_each_backward(how: Run) -> None:
    pair = WithOneProcess(Small, how)
    pair.backward()
    called: dict[int, int] = {}
    for model in pair:

        def count(_: torch.Tensor, key: int = id(model)) -> None:
            called[key] = called.get(key, 0) + 1

        register_multi_grad_hook(list(model.parameters()), count, mode="any")
        model.zero_grad()
    for _ in range(2):
        pair.backward()
    assert called == dict.fromkeys(map(id, pair), 2)
