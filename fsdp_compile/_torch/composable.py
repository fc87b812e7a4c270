"""Private names by which torch's composable APIs know what was applied to a module."""

from __future__ import annotations

import inspect

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import fully_shard

__all__ = ["APPLIED", "note_fully_shard"]

APPLIED = inspect.unwrap(fully_shard)
"""What torch keeps the state of a call of its `fully_shard` under."""


def note_fully_shard(module: nn.Module, state: object) -> None:
    """Makes torch see that `fully_shard` was applied to a module.

    `torch.distributed.fsdp.fully_shard.state(module)` is `state` then, composable `replicate` leaves the module out,
    and torch's `fully_shard` refuses it.

    Args:
        module: A module that our `fully_shard` was called on.
        state: What torch's functions for such modules are to find.
    """
    module.__dict__.setdefault(STATE_KEY, {})[APPLIED] = state
    module.__dict__.setdefault(REGISTRY_KEY, {})[APPLIED.__name__] = RegistryItem()
