"""`sync_module_states`: the values of the first rank of the mesh, sent to all others before they are sharded."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile.comm import alike
from fsdp_compile.sharding.arguments import UnitPolicy, device_of


class FirstRank:
    """What the first rank has values for; all ranks of the mesh make it together.

    Raises:
        RankMismatchError: On all ranks, if they have different models.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], policy: UnitPolicy) -> None:
        groups, device = policy.groups(), device_of(policy.mesh)
        alike.require(
            {name: f"{t.dtype} {tuple(t.shape)}" for name, t in tensors.items()},
            groups,
            device,
            what="models",
            where="fully_shard(sync_module_states=True)",
            instead="the same model on every rank; ranks other than the first may have it on meta",
        )
        valued = alike.of_first([name for name, tensor in tensors.items() if not tensor.is_meta], groups, device)
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
            value = local.detach().to(device).contiguous()
            for group in policy.groups():
                dist.broadcast(value, group=group, group_src=0)
            if value.data_ptr() != local.data_ptr():
                local.detach().copy_(value)
            torch.autograd.graph.increment_version(local)  # collectives do not
