"""Sharded parameters in state dicts: the same memory, each with a storage of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import local_tensor, make_dtensor


def give_storages(module: nn.Module, destination: dict[str, Any], prefix: str, _: object) -> None:
    """Makes the shards of a module in its state dict such that they can be saved and copied: a hook of `state_dict()`.

    Args:
        module: The module that was just saved.
        destination: The state dict.
        prefix: Before each name of the module in it.
    """
    for name, parameter in module._parameters.items():
        value = destination.get(prefix + name)
        if value is parameter or not isinstance(value, DTensor):  # the first: `keep_vars=True`
            continue
        local = local_tensor(value)
        if type(local) is torch.Tensor and not local.is_meta:
            # torch saves and copies a DTensor only if its local tensor begins where its storage begins, and saves
            # whole storages.
            destination[prefix + name] = make_dtensor(torch.from_dlpack(local), value)
