"""The norm of sharded and plain gradients, and their scale: `clip_grad_norm_` and `GradScaler`.

For the norm, each rank takes that of its part; sums of powers (or maxima) are reduced in one all-reduce per process
group, and the coefficient is applied without a synchronization of the host.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_compile._torch.tensors import by_device_and_dtype, foreach_mul_, foreach_norm, unscale_and_check
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.shards import local_of
from fsdp_compile.fsdp2.updates import refuse_whole_gradients
from fsdp_compile.sharding.arguments import device_of


@dataclasses.dataclass(frozen=True)
class Spread:
    """Over which ranks the elements of a tensor are spread.

    Attributes:
        groups: One process group per sharded mesh dimension of more than one rank; none for a tensor that is whole on
            this rank, be it a copy of that of others or its own.
        device: Where tensors that these groups reduce must be; `None` if there are no groups.
    """

    groups: tuple[dist.ProcessGroup, ...] = ()
    device: torch.device | None = None


def spread_of(parameter: torch.Tensor) -> Spread:
    """Where the elements of a parameter, and of its gradient, are; raises `ConfigError` for a `Partial` DTensor."""
    if not isinstance(parameter, DTensor):
        return Spread()
    if any(placement.is_partial() for placement in parameter.placements):
        raise ConfigError(
            f"a tensor is a sum that was not made yet, with placements {parameter.placements}",
            where="clip_grad_norm_(parameters)",
            instead="tensor.redistribute(placements=...) with Replicate() in place of Partial()",
        )
    mesh = parameter.device_mesh
    dims = [d for d, p in enumerate(parameter.placements) if not p.is_replicate() and mesh.size(d) > 1]
    return Spread(tuple(mesh.get_group(d) for d in dims), device_of(mesh)) if dims else Spread()


_EPSILON = 1e-6  # torch's: a norm of zero divides nothing by zero


@torch.compiler.disable
@torch.no_grad()
def clip_grad_norm_(
    model_or_parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002  torch's signature
) -> torch.Tensor:
    """Scales all gradients in place so that their norm, taken as if they were one vector, is at most `max_norm`.

    For any mix of sharded and plain parameters, of meshes, devices and dtypes. To be called on every rank. Gradients of
    ignored parameters are this rank's own: they count once, and if they differ between ranks, so do norm and scale.

    Args:
        model_or_parameters: A module, a parameter or parameters.
        max_norm: The largest norm that remains.
        norm_type: A positive number, or infinity (also as "inf").
        error_if_nonfinite: Raise if the norm is nan or infinite, which makes the host wait for the device.

    Returns:
        The norm before clipping: 0-d, a plain tensor on the device of the first gradient, in the dtype to which the
        gradients' dtypes promote (float32 if there are none). It is accumulated in float32 or better.

    Raises:
        ConfigError: If `norm_type` is not positive, a parameter is a `Partial` DTensor, or is updated in backward.
        RuntimeError: If asked for, when the norm is not finite.
    """
    p = float(norm_type)
    if not p > 0:
        raise ConfigError(
            f"there is no norm of type {norm_type!r}",
            where="clip_grad_norm_(norm_type=...)",
            instead="a positive number, or math.inf",
        )
    given = model_or_parameters.parameters() if isinstance(model_or_parameters, nn.Module) else model_or_parameters
    parameters = [given] if isinstance(given, torch.Tensor) else list(dict.fromkeys(given))
    refuse_whole_gradients(
        parameters,
        where="clip_grad_norm_()",
        instead="flat_step(optimizer) in place of step_in_backward(optimizer), or no clipping by the norm of all",
    )
    gradients = [local_of(q.grad) for q in parameters if q.grad is not None]
    total = _total_norm(parameters, p)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of order {p:g} of the gradients is {total.item()}, so nothing was clipped")
    coefficient = (max_norm / (total + _EPSILON)).clamp(max=1.0)
    for (device, dtype), same in by_device_and_dtype(gradients).items():
        foreach_mul_(same, coefficient.to(device=device, dtype=dtype.to_real()))
    dtypes = {g.dtype.to_real() for g in gradients} or {torch.float32}
    return total.to(functools.reduce(torch.promote_types, dtypes))


def _total_norm(parameters: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    """The norm over all ranks, on the device of the first gradient."""
    # Groups follow from the parameters, not from gradients: a rank without any joins every all-reduce.
    by_spread: dict[Spread, list[torch.Tensor]] = {}
    for parameter in parameters:
        held = by_spread.setdefault(spread_of(parameter), [])
        if parameter.grad is not None:
            held.append(local_of(parameter.grad))
    first = next((g for held in by_spread.values() for g in held), torch.zeros(()))
    powers = {spread: _power(held, p, spread.device or first.device) for spread, held in by_spread.items()}
    _reduce(powers, p)
    parts = [power.to(first.device) for power in powers.values()]
    joined = torch.stack(parts) if parts else torch.zeros(1)
    return joined.amax() if math.isinf(p) else joined.sum().pow(1 / p)


def _power(gradients: Sequence[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """The part of a norm that is reduced over ranks: the sum of p-th powers, or the maximum; 0-d, float32 or better."""
    parts = [torch.zeros((), device=device)]
    held = [g.abs() if g.is_complex() else g for g in gradients if g.numel()]
    for (_, dtype), same in by_device_and_dtype(held).items():
        wide = torch.promote_types(dtype, torch.float32)
        norms = torch.stack(foreach_norm(same, p, dtype=wide))
        parts.append(torch.linalg.vector_norm(norms, p).to(device))
    joined = torch.stack([part.to(functools.reduce(torch.promote_types, {q.dtype for q in parts})) for part in parts])
    return joined.amax() if math.isinf(p) else joined.pow(p).sum()


def _reduce(powers: dict[Spread, torch.Tensor], p: float) -> None:
    """Reduces the powers of this rank over all ranks, in place: one all-reduce per process group."""
    for group in dict.fromkeys(g for spread in powers for g in spread.groups):
        spreads = [spread for spread in powers if group in spread.groups]
        # Meshes may share a group: all that it reduces is one message, in double whatever the gradients' dtypes.
        parts = torch.stack([powers[spread].double() for spread in spreads])
        if math.isinf(p):  # an all-reduced maximum may lose a nan, so nans are reduced with it
            both = torch.cat([parts.nan_to_num(nan=0.0, posinf=math.inf), parts.isnan().to(parts.dtype)])
            dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
            largest, nans = both.chunk(2)
            parts = largest.masked_fill(nans > 0, math.nan)
        else:
            dist.all_reduce(parts, group=group)
        powers.update(zip(spreads, parts.unbind(), strict=True))


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` whose ranks agree on whether some gradient is infinite or nan.

    torch's own scaler agrees if all parameters of an optimizer are sharded, and refuses a mix of sharded and plain
    (ignored) ones. This one takes any mix: each rank checks its part, and one all-reduce makes all ranks take the step
    or none, so that their scales stay equal. The host does not wait for it before `step`.

    Args:
        device: "cuda", "cpu" or another type of accelerator: where the loss is.
        process_group: The ranks that step together; by default all of them.
        kwargs: As for `torch.amp.GradScaler`: `init_scale`, `growth_interval` and so on.
    """

    def __init__(self, device: str = "cuda", *, process_group: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self.process_group = process_group

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,  # noqa: FBT001
    ) -> dict[torch.device, torch.Tensor]:
        # The one place that torch's unscale_() and step(), of fused optimizers too, go through on 2.11 to 2.15.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        refuse_whole_gradients(
            parameters,
            where="GradScaler with step_in_backward()",
            instead="bfloat16, which needs no scaling; or flat_step(optimizer) in place of step_in_backward(optimizer)",
        )
        gradients = [_dense(p.grad) for p in parameters if p.grad is not None]
        if not allow_fp16 and any(g.dtype == torch.float16 for g in gradients):
            raise ValueError("gradients in float16 cannot be unscaled: keep parameters in float32, and compute in half")
        agreed = found_inf.clone()
        devices = {found_inf.device: agreed}
        for (device, _), same in by_device_and_dtype([g for g in gradients if g.numel()]).items():
            here = devices.setdefault(device, found_inf.to(device, copy=True))
            unscale_and_check(same, here, inv_scale.to(device))
        for other in list(devices.values())[1:]:
            torch.maximum(agreed, other.to(agreed.device), out=agreed)
        if dist.is_initialized():
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self.process_group)
        return {device: agreed.to(device) for device in devices}


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """The memory that is to be unscaled: of a sparse gradient, its values."""
    if gradient.is_sparse:
        if gradient.dtype == torch.float16:
            gradient = gradient.coalesce()  # sums of duplicates may overflow
        return gradient._values()
    return local_of(gradient)
