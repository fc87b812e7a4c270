"""How many bytes of training state a rank holds: by calculation, and by looking."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """Bytes of training state that one rank keeps between steps.

    Attributes:
        parameters: Weights.
        gradients: One gradient for every weight.
        optimizer: AdamW's two averages of every weight, and its counters.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


def expected(model: nn.Module, ranks: int) -> HeldBytes:
    """What the fullest rank will hold: rows are dealt out in equal chunks, alignment not counted.

    Args:
        model: A model whose parameters are not sharded yet.
        ranks: Number of ranks; 1 gives the unsharded bytes.
    """
    shards = [_largest_shard_bytes(parameter, ranks) for parameter in model.parameters()]
    weights, counters = sum(shards), 4 * len(shards)
    return HeldBytes(parameters=weights, gradients=weights, optimizer=2 * weights + counters)


def measured(optimizer: torch.optim.Optimizer) -> HeldBytes:
    """What this rank holds, padding and alignment included. Call it between backward and `zero_grad`.

    Args:
        optimizer: Has stepped at least once.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = [value for values in optimizer.state.values() for value in values.values()]
    return HeldBytes(
        parameters=storage_bytes(parameters),
        gradients=storage_bytes(gradients),
        optimizer=storage_bytes(value for value in state if isinstance(value, Tensor)),
    )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind tensors on this rank; memory that several share counts once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _largest_shard_bytes(parameter: Tensor, ranks: int) -> int:
    rows = parameter.shape[0] if parameter.ndim else 1
    row_bytes = parameter.numel() // max(rows, 1) * parameter.element_size()
    return -(-rows // ranks) * row_bytes
