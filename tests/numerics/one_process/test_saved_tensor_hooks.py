"""Hooks on saved tensors, as activation offloading has them, see activations and no sharded parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from fsdp_compile import units
from tests.beside import Beside, Run, loss_of
from tests.models.outlines import Small
from tests.ranks import run_ranks

Hooks = Callable[[], saved_tensors_hooks]


def _copying() -> saved_tensors_hooks:
    return saved_tensors_hooks(torch.clone, lambda t: t)


def _changed(saved: torch.Tensor) -> torch.Tensor:
    return saved * (1 + 1e-6)


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


def _unseen() -> None:
    pair = Beside(Small, Run.SHARDED)
    packed: list[int] = []

    def note(saved: torch.Tensor) -> torch.Tensor:
        packed.append(saved.data_ptr())
        return _changed(saved)

    pair.optimize(lambda p: torch.optim.SGD(p, lr=0.1))
    _step(pair, lambda: saved_tensors_hooks(note, lambda t: t))
    assert packed, "activations"
    assert not {group.flat.data_ptr() for unit in units(pair.model) for group in unit.groups}.intersection(packed)


def test_hooks_do_not_see_sharded_parameters() -> None:
    run_ranks(_unseen)
