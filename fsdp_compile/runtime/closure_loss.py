"""The loss by which LBFGS decides how far it goes: the mean over the ranks, as the gradients are.

A closure returns the loss of a rank's own rows. Ranks that stop, or search a line, by losses of their own take other
steps than each other, and call the closure another number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import LBFGS, Optimizer

from fsdp_compile.comm.exchange import wire_device
from fsdp_compile.comm.failures import refuse_lost_ranks
from fsdp_compile.runtime.units import FSDPParam, sharded_parameters

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def average_loss(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments | None:
    """The arguments of `LBFGS.step`, the optimizer among them, with a closure whose loss is averaged.

    Returns:
        `None` for other optimizers, and where nothing is sharded over several ranks.
    """
    if not isinstance(optimizer, LBFGS):
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    sharded = sharded_parameters()
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    param = next((sharded[parameter] for parameter in parameters if parameter in sharded), None)
    if closure is None or param is None or param.dtensor.device_mesh.size() == 1:
        return None
    return (optimizer, _averaging(closure, param)), {}


def _averaging(closure: Callable[[], Any], param: FSDPParam) -> Callable[[], torch.Tensor]:
    def averaged() -> torch.Tensor:
        loss = closure()
        value = loss.detach() if isinstance(loss, torch.Tensor) else torch.tensor(float(loss), dtype=torch.float64)
        try:
            # Where parameters are offloaded, their group communicates elsewhere.
            value = value.to(wire_device(param.sharded_view, param.spec), copy=True)
            return _mean(value, param.dtensor.device_mesh)
        except RuntimeError as error:
            refuse_lost_ranks(error, "averaging the loss of a closure for LBFGS")
            raise

    return averaged


def _mean(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    for dim in range(mesh.ndim):
        dist.all_reduce(value, group=mesh.get_group(dim))
    return value / mesh.size()
