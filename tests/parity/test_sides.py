"""The reference without shards: one process that reads its parameters in another dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from fsdp_compile.parity.sides import CastParameters
from tests.models.matrix import MODELS, make_batch

_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    """Of two forwards with a backward each."""
    cast = CastParameters(model, _BF16)
    for step in range(2):
        cast(make_batch(step)).float().square().mean().backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None for g in gradients)
    return [g for g in gradients if g is not None]


def _seeded(model: str, *, recompute: bool) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model](recompute=recompute)


@pytest.mark.core
@pytest.mark.parametrize("model", ["plain", "tied", "repeated"])
def test_recomputation_reads_the_same_cast_parameters(model: str) -> None:
    kept = _gradients(_seeded(model, recompute=False))
    again = _gradients(_seeded(model, recompute=True))
    assert {g.dtype for g in again} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(again, kept, strict=True))


class _Reentrant(nn.Module):
    """Backward runs through the recomputed graph itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 3)
        self.recompute = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return checkpoint(self.second, x, use_reentrant=True) if self.recompute else self.second(x)


def test_reentrant_recomputation_reaches_the_parameters() -> None:
    torch.manual_seed(0)
    again, kept = _Reentrant(), _Reentrant()
    kept.load_state_dict(again.state_dict())
    kept.recompute = False
    assert all(torch.equal(a, b) for a, b in zip(_gradients(again), _gradients(kept), strict=True))
