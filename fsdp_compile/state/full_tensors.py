"""`full_tensors`: the full values of a sharded model, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile.comm.gather import Receivers, first_rank, gather_whole
from fsdp_compile.runtime.extended_reads import refuse_extended
from fsdp_compile.runtime.module_state import units_below, unwrap
from fsdp_compile.runtime.split_params import meshes_of
from fsdp_compile.runtime.units import FSDPParam, sharded_parameters
from fsdp_compile.state.outside_of_steps import check, refuse_inside_a_step

_WHERE = "full_tensors()"
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What torch puts into names where a compiled module is, or one that is checkpointed by its `checkpoint_wrapper`."""


def full_tensors(
    model: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name and the full value of each tensor of `model.state_dict()`, in its order.

    A parameter is gathered when it is asked for: beside its shards, a rank holds one full value and one message of at
    most 16 MiB; two full values if it is sharded over another dimension than the first. (A loop's variable keeps a
    value until it has the next: `del` it where two do not fit.) All ranks iterate to the end, between steps, and change
    nothing meanwhile.

    Names are the plain model's, with and without `torch.compile`. A parameter with several names is yielded under each.
    What is not sharded, as buffers, is this rank's own memory, detached. Entries that are no tensors are left out.

    Args:
        model: A sharded or compiled model, or a module in it.
        rank0_only: Only the first rank of the mesh gets values. On others the loop has no iterations; they take part
            in it all the same.
        cpu_offload: Values are in the memory of the host. Devices hold no more than a message of a parameter that is
            sharded over its first dimension.

    Raises:
        ConfigError: When it is called, inside a forward or a backward, inside `full_params`, or if a parameter is on
            the meta device.
    """
    module = unwrap(model)
    assert isinstance(module, nn.Module)
    refuse_inside_a_step(
        _WHERE, what="parameters cannot be gathered one by one inside a step", instead=f"{_WHERE} before or after it"
    )
    units = units_below(module)
    check(units, _WHERE, instead="full_tensors(model) outside of full_params(); inside, model.state_dict() is full")
    refuse_extended(
        (param for unit in units for param in unit.params),
        _WHERE,
        instead="torch.distributed.checkpoint, which saves each rank's part",
    )
    receivers = Receivers.FIRST if rank0_only else Receivers.ALL
    own_rank = dist.get_rank() if dist.is_initialized() else 0
    is_receiver = not rank0_only or own_rank == first_rank(meshes_of(units), _WHERE)
    return _yield_values(module, receivers, cpu_offload=cpu_offload, is_receiver=is_receiver)


def _yield_values(
    module: nn.Module, receivers: Receivers, *, cpu_offload: bool, is_receiver: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    sharded = sharded_parameters()
    values = module.state_dict()  # with buffers in their own dtype
    held: dict[str, Any] = module.state_dict(keep_vars=True)  # with the very parameters
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            continue
        # No variable refers to the full value, so that it is gone when the next one is gathered.
        if is_receiver:
            yield plain_name(name), _full(value, sharded.get(held.get(name)), receivers, cpu_offload=cpu_offload)  # type: ignore[arg-type]
        else:
            _full(value, sharded.get(held.get(name)), receivers, cpu_offload=cpu_offload)  # type: ignore[arg-type]


def _full(value: torch.Tensor, param: FSDPParam | None, receivers: Receivers, *, cpu_offload: bool) -> Any:
    """The full value of an entry of a state dict on ranks that receive it."""
    if param is not None:
        return gather_whole(
            *(param.sharded_view, param.spec, param.tensor_parallel, receivers),
            torch.device("cpu") if cpu_offload else None,
        )
    whole = value.full_tensor() if isinstance(value, DTensor) else value  # DTensors of another library
    return whole.detach().cpu() if cpu_offload else whole.detach()


def plain_name(name: str) -> str:
    """The name in the plain model of a parameter or buffer in one that is compiled or checkpointed in parts."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
