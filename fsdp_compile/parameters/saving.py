"""What `state_dict()` gives for a sharded parameter.

Torch saves and copies a DTensor only if its local tensor begins where its storage begins, and it writes storages
whole. A parameter lies somewhere in its flat shard. So a state dict holds the same memory under a storage of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fsdp_compile._torch import local_tensor, make_dtensor
from fsdp_compile.parameters.flat import FlatShard, ParameterSlot


def give_storages(
    module: nn.Module, destination: dict[str, Any], prefix: str, flats: Iterable[tuple[str, FlatShard]]
) -> None:
    """Replaces sharded parameters in a state dict by DTensors that can be saved and copied, and share their memory.

    Args:
        module: The module that was just saved.
        destination: The state dict.
        prefix: Before each name of the module in it.
        flats: Names of sharded parameters of the module, each with the flat shard that it lies in.
    """
    for name, flat in flats:
        slot = next((s for s in flat.slots if s.parameter is module._parameters.get(name)), None)
        if slot is not None and flat.leaf.device.type != "meta" and slot.local is local_tensor(slot.dtensor):
            destination[prefix + name] = _with_own_storage(slot)


def _with_own_storage(slot: ParameterSlot) -> torch.Tensor:
    return make_dtensor(torch.from_dlpack(slot.local), slot.dtensor)
