"""`fully_shard` with automatic units."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_compile.sharding.wrap import automatic_units


def fully_shard(module: nn.Module, **arguments: Any) -> nn.Module:
    """Shards the parameters of a model: repeated blocks, then embedding and head, then the rest; ties in one call."""
    found: list[tuple[list[nn.Module], set[int]]] = []
    for unit in automatic_units(module, set(module.parameters())):
        modules, ids = [unit], {id(p) for p in unit.parameters()}
        for other in [f for f in found if f[1] & ids]:
            found.remove(other)
            modules, ids = [*other[0], *modules], ids | other[1]
        found.append((modules, ids))
    for modules, _ in reversed(found):
        torch_fully_shard(modules if len(modules) > 1 else modules[0], **arguments)  # type: ignore[arg-type]
    torch_fully_shard(module, **arguments)
    return module
