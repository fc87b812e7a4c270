"""Hooks on saved tensors, as activation offloading has them, give backward copies of flat parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from fsdp_compile import UnsupportedModelError, units
from tests.beside import Beside, Run, loss_of
from tests.models.outlines import Small
from tests.ranks import run_ranks

Hooks = Callable[[], saved_tensors_hooks]


def _copying() -> saved_tensors_hooks:
    return saved_tensors_hooks(torch.clone, lambda t: t)


def _rounding() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: t * (1 + 1e-6), lambda t: t)


class _Branches(nn.Module):
    """Two layers in one unit, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.chosen = "left"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) if self.chosen == "left" else self.right(x)


def _step(pair: Beside, hooks: Hooks) -> None:
    pair.steps += 1
    batch = torch.randn(2 * dist.get_world_size(), 6, generator=torch.Generator().manual_seed(pair.steps))
    with hooks():
        loss = loss_of(pair.compiled(batch.chunk(dist.get_world_size())[dist.get_rank()]))
    loss.backward()
    loss_of(pair.reference(batch)).backward()
    pair.compare()
    for optimizer in pair.optimizers[0]:
        optimizer.step()
        optimizer.zero_grad()


def _trained() -> None:
    for hooks in (_copying, save_on_cpu):
        pair = Beside(_Branches, Run.SHARDED)
        assert len(units(pair.model)) == 1
        pair.optimize(lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-3, weight_decay=0.5))
        for chosen in ("left", "right", "left"):
            pair.change(lambda model: setattr(model, "chosen", chosen))  # noqa: B023  runs at once
            _step(pair, hooks)
        pair.compare()


def test_parameters_that_are_left_out_have_no_gradient() -> None:
    run_ranks(_trained)


def _other_values() -> None:
    pair = Beside(Small, Run.SHARDED)
    pair.optimize(lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.warns(UserWarning, match="other values than a flat parameter has"):
        _step(pair, _rounding)
    branches = Beside(_Branches, Run.SHARDED)
    with _rounding():
        loss = loss_of(branches.compiled(torch.ones(2, 6)))
    with pytest.raises(UnsupportedModelError, match=r"(?s)cannot tell which parameters get no gradient.*save_on_cpu"):
        loss.backward()
    branches.compare()


def test_values_that_hooks_have_changed_are_refused_if_parameters_are_left_out() -> None:
    run_ranks(_other_values)
