"""Does your model train the same compiled as with eager FSDP2? `check_parity` compares every number.

python docs/examples/parity.py
"""

import torch
from torch import nn

from fsdp_compile import check_parity


def make_model() -> nn.Module:
    """Your model: each rank calls this function."""
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def make_batch(step: int) -> torch.Tensor:  # noqa: ARG001
    """The batch of all ranks; each rank gets its rows of it."""
    return torch.randn(8, 16)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A mean over rows."""
    return model(batch).square().mean()


if __name__ == "__main__":  # each rank is a new process, which imports this file
    report = check_parity(make_model, make_batch, loss=loss, world_size=2, steps=3)
    print(report)
