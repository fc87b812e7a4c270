"""Private names of `torch.optim.LBFGS`: how it makes one vector of all gradients, and adds one to all parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn, optim


def replace_vectors(
    optimizer: optim.LBFGS,
    join: Callable[[Sequence[nn.Parameter]], torch.Tensor],
    add: Callable[[Sequence[nn.Parameter], torch.Tensor, float], None],
) -> None:
    """Makes an LBFGS compute with other vectors.

    Args:
        optimizer: It is changed.
        join: The gradients of all parameters as one vector.
        add: Adds a vector of this kind, times a number, to the parameters.
    """

    def gather_flat_grad() -> torch.Tensor:
        return join(optimizer._params)

    def add_grad(step_size: float, update: torch.Tensor) -> None:
        add(optimizer._params, update, step_size)

    optimizer._gather_flat_grad = gather_flat_grad  # type: ignore[method-assign]
    optimizer._add_grad = add_grad  # type: ignore[method-assign]
