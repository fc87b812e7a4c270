"""Private names of torch about tensors and DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._dtype_abbrs import dtype_abbrs
from torch.utils._pytree import tree_leaves, tree_map

OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator
_OLDER_BATCH: Any = torch._C._parse_dispatch_key("Batched")
_OUTERMOST_BATCH = 1
"""Level of a batch that is in no other one."""


def make_dtensor(local: torch.Tensor, like: Any) -> DTensor:
    """Wraps `local` as a DTensor of the mesh, placements and global shape of the DTensor `like`; no check, no copy."""
    spec = like._spec
    if local.dtype != like.dtype:
        meta = TensorMeta(like.shape, like.stride(), local.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, meta)
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def new_dtensor(local: torch.Tensor, mesh: dist.DeviceMesh, placements: tuple[Any, ...], shape: torch.Size) -> DTensor:
    """A DTensor of global `shape` (contiguous) over this rank's `local` part; no communication, no check."""
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(mesh, placements, TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


local_tensor: Callable[[DTensor], torch.Tensor] = attrgetter("_local_tensor")
"""The local tensor of a DTensor itself, without autograd and without a view."""


def set_local_tensor(parameter: DTensor, local: torch.Tensor) -> None:
    """Replaces the local tensor of a DTensor."""
    # In place: optimizers refer to parameters by identity.
    parameter._local_tensor = local


def note_gathered(result: torch.Tensor) -> None:
    """Makes Python find a gathered parameter to be an `nn.Parameter`, as FSDP2's are; `is_gathered` tells it apart."""
    result._is_param = True
    result._is_gathered = True  # type: ignore[attr-defined]


def is_gathered(value: object) -> bool:
    """Whether a value is a gathered parameter that a graph has returned."""
    return hasattr(value, "_is_gathered")


def memory_id(tensor: torch.Tensor) -> int:
    """A number that views of one memory share; fake tensors have memory in this sense, too."""
    held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    while is_functorch_wrapped_tensor(held):  # inside of `torch.func.grad`, `jvp` and `vmap`
        held = get_unwrapped(held)
    return held.untyped_storage()._cdata


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a batch of tensors inside of `vmap`."""
    # `torch.autograd` has a `vmap` of its own, older than `torch.func`'s.
    return is_batchedtensor(tensor) or torch._C._dispatch_keys(tensor).has(_OLDER_BATCH)


def split_batch(batch: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a batch that `torch.autograd` has made; none of a batch of batches."""
    plain = torch._remove_batch_dim(batch, _OUTERMOST_BATCH, 0, 0)
    return [] if is_batched(plain) else list(plain.unbind())


def join_batch(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A batch of tensors, as `torch.autograd` makes it."""
    return torch._add_batch_dim(torch.stack(list(tensors)), 0, _OUTERMOST_BATCH)


def by_device_and_dtype(
    tensors: Iterable[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Tensors in their order, grouped as the operators below take them."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


foreach_norm = torch._foreach_norm
"""The norm of each of some tensors of one dtype, accumulated and returned in another."""
foreach_mul_ = torch._foreach_mul_
"""Multiplies tensors of one device and dtype in place by a 0-d tensor of theirs."""
foreach_lerp_ = torch._foreach_lerp_
"""Moves tensors of one device and dtype in place towards others, by a part of the way."""
foreach_copy_ = torch._foreach_copy_
"""Copies tensors into others."""
unscale_and_check = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiplies tensors of one device and dtype in place; sets a 0-d tensor to 1 if a value is not finite."""
