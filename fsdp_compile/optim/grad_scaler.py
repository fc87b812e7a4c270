"""`GradScaler`: all ranks skip a step together, even if some parameters are plain."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fsdp_compile._torch.tensors import by_device_and_dtype, unscale_and_check
from fsdp_compile.fsdp2.shards import local_of
from fsdp_compile.fsdp2.updates import refuse_whole_gradients


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
