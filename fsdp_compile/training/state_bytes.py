"""How many bytes of training state a rank has: calculated, and measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of training state of one rank between steps; `optimizer` is AdamW's two averages, and its counters."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


def expected(model: nn.Module, ranks: int) -> StateBytes:
    """The bytes of the fullest of `ranks` ranks: rows in equal chunks, without alignment.

    The model's parameters must not be sharded yet.
    """
    shards = [_largest_shard_bytes(parameter, ranks) for parameter in model.parameters()]
    weights, counters = sum(shards), 4 * len(shards)
    return StateBytes(parameters=weights, gradients=weights, optimizer=2 * weights + counters)


def measured(optimizer: torch.optim.Optimizer) -> StateBytes:
    """The bytes of this rank, padding and alignment included; to be called between backward and `zero_grad`."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = [value for values in optimizer.state.values() for value in values.values()]
    return StateBytes(
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
