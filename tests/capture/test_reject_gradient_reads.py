"""Compiled code would find no gradients: what asks for them there is refused, and other reads are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from fsdp_compile import fully_shard
from tests.beside import compile_eagerly
from tests.fake_world import fake_world


class _Model(nn.Module):
    """One whose forward asks a parameter for nothing but its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)) / self.first.weight.shape[0]


@pytest.mark.parametrize(
    "step",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda model: model.zero_grad(),
    ],
    ids=["clip", "zero_grad"],
)
def test_what_asks_for_gradients_is_refused_with_its_line(step: Callable[[nn.Module], object]) -> None:
    with fake_world(2):
        model = fully_shard(_Model())
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(BackendCompilerFailed, match="it would find no gradients") as caught:
            compile_eagerly(lambda: step(model))()
        assert "test_reject_gradient_reads.py" in str(caught.value.inner_exception)
        assert all(p.grad is not None for p in model.parameters())


def test_other_reads_in_compiled_code_are_not_refused() -> None:
    with fake_world(2):
        model: Any = fully_shard(_Model())

        def penalized(x: torch.Tensor) -> torch.Tensor:
            return model(x).sum() + sum(p.square().sum() for p in model.parameters())

        loss = compile_eagerly(penalized)(torch.ones(2, 4))
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
