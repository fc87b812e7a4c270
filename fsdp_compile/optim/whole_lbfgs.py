"""LBFGS on shards of any shape: its vectors are those of one process, full on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn, optim

from fsdp_compile._torch.lbfgs import replace_vectors
from fsdp_compile._torch.tensors import local_tensor
from fsdp_compile.comm.gather import Receivers, gather_whole
from fsdp_compile.runtime.units import FSDPParam, sharded_parameters


def use_full_vectors(optimizer: optim.LBFGS) -> None:
    """Makes an LBFGS gather its gradients into plain vectors, and cut its directions into shards."""
    replace_vectors(optimizer, _joined, _add)


def _joined(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """All gradients, full, in one vector; zeros for one that is missing, as in torch's."""
    sharded = sharded_parameters()
    return torch.cat([_full_gradient(parameter, sharded.get(parameter)).reshape(-1) for parameter in parameters])


def _full_gradient(parameter: nn.Parameter, param: FSDPParam | None) -> torch.Tensor:
    gradient = parameter.grad
    if param is None:
        return torch.zeros_like(parameter) if gradient is None else gradient
    local = param.sharded_view if gradient is None else local_tensor(gradient)  # type: ignore[arg-type]
    if gradient is None:
        return local.new_zeros(param.dtensor.shape)
    full = gather_whole(local, param.spec, param.tensor_parallel, Receivers.ALL, local.device)
    assert full is not None
    return full


@torch.no_grad()
def _add(parameters: Sequence[nn.Parameter], update: torch.Tensor, step_size: float) -> None:
    """Adds a vector to all parameters: to a sharded one this rank's part."""
    sharded = sharded_parameters()
    parts = update.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        full, param = part.view(parameter.shape), sharded.get(parameter)
        if param is None:
            parameter.add_(full, alpha=step_size)
        else:
            local_tensor(param.dtensor).add_(param.own_part(full), alpha=step_size)
