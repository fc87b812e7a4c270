"""`sync_module_states`: the values of the first rank of the mesh, sent to all others before they are sharded."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile.errors import RankMismatchError
from fsdp_compile.sharding.arguments import UnitPolicy, device_of


class FirstRank:
    """What the first rank has values for; all ranks of the mesh make it together.

    Raises:
        RankMismatchError: On all ranks, if they have different models.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], policy: UnitPolicy) -> None:
        own = {name: (tuple(t.shape), str(t.dtype)) for name, t in tensors.items()}
        # What one rank raises, all must: others would wait for it.
        sent: list[Any] = [(own, [name for name, t in tensors.items() if not t.is_meta])]
        groups, device = _groups(policy), device_of(policy.mesh)
        for group in groups:
            dist.broadcast_object_list(sent, group=group, group_src=0, device=device)
        theirs, valued = sent[0]
        is_equal = torch.tensor(int(own == theirs), device=device)
        for group in groups:
            dist.all_reduce(is_equal, dist.ReduceOp.MIN, group=group)
        if not is_equal.item():
            different = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
            raise RankMismatchError(
                "ranks have different models"
                if not different
                else f"this rank has {own.get(different[0])} and the first has {theirs.get(different[0])}",
                where=f"fully_shard(sync_module_states=True), {different[0] if different else 'another rank'}",
                instead="the same model on every rank; ranks other than the first may have it on meta",
            )
        self._tensors = [tensors[name] for name in valued]

    @torch.no_grad()
    def send(self, wanted: Container[torch.Tensor], policy: UnitPolicy) -> None:
        """Gives some tensors the first rank's values on all ranks of a mesh, and memory where they have none."""
        device = device_of(policy.mesh)
        sent = [tensor for tensor in self._tensors if tensor in wanted]
        self._tensors = [tensor for tensor in self._tensors if tensor not in wanted]  # their memory ends with sharding
        for tensor in sent:
            if tensor.is_meta:
                value: torch.Tensor = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                torch.utils.swap_tensors(tensor, value)
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            broadcast(local, policy)


def broadcast(tensor: torch.Tensor, policy: UnitPolicy) -> None:
    """Sends a tensor of the first rank of a unit's mesh to all of its ranks; also one that lies on another device."""
    device = device_of(policy.mesh)
    sent = tensor.detach().to(device).contiguous()
    for group in _groups(policy):
        dist.broadcast(sent, group=group, group_src=0)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(sent)


def _groups(policy: UnitPolicy) -> list[dist.ProcessGroup]:
    return [policy.mesh.get_group(dim) for dim in policy.mesh_dims()]
