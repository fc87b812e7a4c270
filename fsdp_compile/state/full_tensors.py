"""`full_tensors`: the full values of a sharded model, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile.fsdp2.shards import full_value, is_first, plain_name, require_alike, shard_between_steps, unwrap

_WHERE = "full_tensors()"


def full_tensors(
    model: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name and the full value of each tensor of `model.state_dict()`, in its order.

    A parameter is gathered when it is its turn: a rank has its shards and one full value. (A loop's variable keeps a
    value until it has the next: `del` it where two do not fit.) All ranks iterate to the end, between steps, and change
    nothing meanwhile.

    Names are the plain model's, with and without `torch.compile`. A parameter with several names is yielded under each.
    What is not sharded, as buffers, is this rank's own memory, detached. Entries that are no tensors are left out.

    Args:
        model: A sharded or compiled model, or a module in it.
        rank0_only: Only the first rank of the mesh gets values. On others the loop has no iterations; they take part
            in it all the same.
        cpu_offload: Values are in the memory of the host.

    Raises:
        ConfigError: When it is called, inside a forward or a backward; with `rank0_only`, if parameters are sharded
            over meshes whose first ranks differ.
        RankMismatchError: On all ranks, if a parameter was replaced, and not by the same kind on all of them.
    """
    module = unwrap(model)
    shard_between_steps(module, _WHERE, instead=f"{_WHERE} before or after it")
    receives = not rank0_only or is_first(module.parameters(), _WHERE)
    require_alike(dict(module.named_modules()), _WHERE)
    return _yield_values(module, receives=receives, cpu_offload=cpu_offload)


def _yield_values(module: nn.Module, *, receives: bool, cpu_offload: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            continue
        # No variable refers to the full value, so that it is gone when the next one is gathered.
        if receives:
            yield plain_name(name), _full(value, cpu_offload=cpu_offload)
        elif isinstance(value, DTensor):
            full_value(value)


def _full(value: torch.Tensor, *, cpu_offload: bool) -> torch.Tensor:
    whole = full_value(value) if isinstance(value, DTensor) else value.detach()
    return whole.cpu() if cpu_offload else whole
