"""Private names of torch's FSDP2: one parameter, its DTensor, its shard, and the modules that register it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

TorchParam = Any
"""A `FSDPParam` of torch."""
HAS_GRAD_DTYPES: Final = hasattr(FSDPParam, "unsharded_grad_dtype")
"""Whether gradients have a dtype of their own, as from torch 2.15 on: by default that in which a parameter is stored.

The gradient of each microbatch is rounded to it. Before, the sum of microbatches alone is rounded."""


sharded_param: Callable[[TorchParam], nn.Parameter] = attrgetter("sharded_param")
"""The DTensor parameter that users, optimizers and checkpoints see."""
shard_data: Callable[[TorchParam], torch.Tensor] = attrgetter("_sharded_param_data")
"""This rank's shard with padding, 1-D, as FSDP2 sends it."""
padded_shape: Callable[[TorchParam], torch.Size] = attrgetter("padded_sharded_param_size")
"""Shape of this rank's shard with padding, the same on all ranks."""
shard_dim: Callable[[TorchParam], int] = attrgetter("fsdp_placement.dim")
"""The dimension that is sharded."""
pins_memory: Callable[[TorchParam], bool] = attrgetter("pin_memory")
"""Whether the shard is in page-locked memory of the host."""
Seen = tuple[TorchParam, nn.Parameter, torch.Tensor, bool]
"""A parameter, and what it was when it was looked at: its DTensor, that one's local tensor, whether it is trained."""


def seen_params(params: Sequence[TorchParam]) -> list[Seen]:
    """What differs once DTensor parameters were replaced, written to by `.data`, frozen or thawed."""
    return [(each, p := each.sharded_param, p._local_tensor, p.requires_grad) for each in params]


def are_changed(seen: Sequence[Seen]) -> bool:
    """Whether any parameter differs from what was seen."""
    # Each forward asks: no call of Python for each parameter.
    for each, parameter, local, is_trained in seen:
        if (
            each.sharded_param is not parameter
            or parameter._local_tensor is not local
            or parameter.requires_grad is not is_trained
        ):
            return True
    return False


def shape_of(param: TorchParam) -> tuple[int, ...]:
    """Shape of the gathered parameter; of this rank's part of it if it is a DTensor over other ranks, too."""
    return tuple(param._orig_size)


def set_shard_data(param: TorchParam, data: torch.Tensor) -> None:
    """Replaces `shard_data`."""
    param._sharded_param_data = data


def param_dtype(param: TorchParam) -> torch.dtype:
    """The dtype in which a parameter is gathered, as its policy says."""
    found: torch.dtype = param.param_dtype or param.orig_dtype
    return found


def reduce_dtype(param: TorchParam) -> torch.dtype:
    """The dtype in which its gradients are accumulated and reduced.

    Where its policy has none, that is `param_dtype`, and from torch 2.15 on the dtype in which it is stored.
    """
    chosen: torch.dtype | None = param.reduce_dtype
    return chosen or (param.orig_dtype if HAS_GRAD_DTYPES else param_dtype(param))


def has_own_grad_dtype(param: TorchParam) -> bool:
    """Whether `Tensor.grad_dtype` asks for gradients of another dtype than its own; FSDP2 heeds it since 2.15."""
    asks = getattr(param, "_has_sharded_grad_dtype_override", False)
    return asks and param.sharded_grad_dtype != param.orig_dtype


def has_spmd_types(param: TorchParam) -> bool:
    """Whether forwards compute with a plain tensor whose `spmd_types` FSDP2 keeps apart (since torch 2.14)."""
    return getattr(param, "is_spmd_types", False)


def unsharded_spec(param: TorchParam) -> Any:
    """The `DTensorSpec` of the gathered parameter if that is a DTensor (tensor parallel), else `None`."""
    if hasattr(param, "_unsharded_dtensor_spec"):
        return param._unsharded_dtensor_spec
    return getattr(param, "_tp_spec", None)  # up to torch 2.11


def data_parallel_dims(param: TorchParam) -> frozenset[int]:
    """The dimensions of the gathered DTensor's mesh that it is sharded and replicated over (`dp_mesh_dims`)."""
    return getattr(param, "_dp_dim_indices", frozenset())


def refs_of(param: TorchParam) -> list[tuple[nn.Module, str]]:
    """The modules that register a parameter, with its name in each."""
    info = param._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def are_registered(params: Sequence[TorchParam]) -> bool:
    """Whether modules have sharded parameters in all their places; as `seen_params`, in one call."""
    for param in params:
        info, sharded = param._module_info, param.sharded_param
        if info.module._parameters.get(info.param_name) is not sharded:
            return False
        for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
            if module._parameters.get(name) is not sharded:
                return False
    return True


def tie_again(params: Sequence[TorchParam]) -> None:
    """Registers tied sharded parameters in all their places, as FSDP2 does when it has gathered them.

    After `load_state_dict(assign=True)`, as of a model on meta, each place has a parameter of its own; FSDP2 takes the
    first one.
    """
    for param in params:
        info, sharded = param._module_info, param.sharded_param
        if info.module._parameters.get(info.param_name) is not sharded:
            continue
        for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
            if isinstance(held := module._parameters.get(name), nn.Parameter) and isinstance(held, DTensor):
                module._parameters[name] = sharded


def end_unshard(group: Any) -> None:
    """Waits for a gather of FSDP2's group, and freezes or thaws what is sharded like the gathered parameters."""
    group.wait_for_unshard()
    for param in group.fsdp_params:
        gathered = getattr(param, "_unsharded_param", None)
        # Users have frozen and thawed what modules have registered.
        if (
            gathered is not None
            and param._module_info.module._parameters.get(param._module_info.param_name) is gathered
        ):
            param.sharded_param.requires_grad_(gathered.requires_grad)


def is_parametrized(param: TorchParam) -> bool:
    """Whether a module computes a parameter from others now, which it did not when it was sharded."""
    return any(parametrize.is_parametrized(module, name) for module, name in refs_of(param))


def has_unreduced_grad(param: TorchParam) -> bool:
    """Whether FSDP2 has a gradient of a parameter that it has not reduced yet."""
    gathered = getattr(param, "_unsharded_param", None)
    return param.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None)


def take_unreduced_grad(param: TorchParam) -> torch.Tensor | None:
    """This rank's part of the gradient that FSDP2 has accumulated without reducing it, which it forgets."""
    grad = param.unsharded_accumulated_grad
    if grad is not None:
        _set_accumulated(param, None)
    elif hasattr(param, "_unsharded_param"):
        gathered = param._unsharded_param
        grad, gathered.grad = gathered.grad, None
    return None if grad is None else param._get_grad_inner_tensor(grad)


def give_unreduced_grad(param: TorchParam, grad: torch.Tensor) -> None:
    """Makes FSDP2 add an unreduced gradient to what it reduces next; it has gathered the parameter before."""
    known = param.unsharded_accumulated_grad
    _set_accumulated(param, grad if known is None else known + grad)


def _set_accumulated(param: TorchParam, grad: torch.Tensor | None) -> None:
    if isinstance(getattr(type(param), "unsharded_accumulated_grad", None), property):
        # Torch 2.15 accumulates in the gradient of the unsharded parameter itself.
        param._unsharded_param.grad = grad
    else:
        param.unsharded_accumulated_grad = grad
