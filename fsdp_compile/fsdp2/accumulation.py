"""`no_sync`: microbatches whose gradients are accumulated without communication."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from fsdp_compile._torch import fully_shard as fsdp2
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.shards import unwrap

_plain_inside: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""Modules that were given to `no_sync` blocks which run: their models may be sharded in them."""


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulates gradients without communication: backwards in the block leave theirs unreduced on each rank.

    The next backward outside of it adds them to its own gradients and reduces the sum once. It is FSDP2's
    `set_requires_gradient_sync(False)` for the time of the block: whether a compiled backward reduces is decided when
    its forward runs. Accumulated gradients take the memory of a full gradient, in the reduce dtype; they are not in
    `.grad`, and `zero_grad()` does not drop them.

    Args:
        model: The model, compiled or not. It may be sharded by its first call inside of the block.

    Raises:
        ConfigError: If `model` is no module.

    Example:
        >>> with no_sync(model):
        ...     model(first).backward()
        >>> model(last).backward()
    """
    module: Any = unwrap(model)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"{type(module).__name__} is not a torch.nn.Module",
            where="no_sync(model)",
            instead="the model, or the result of torch.compile(model); for a compiled function, the model it calls",
        )
    before = {id(group): fsdp2.reductions(group) for group in fsdp2.groups_below(module)}
    _plain_inside[module] = _plain_inside.get(module, 0) + 1
    try:
        for group in fsdp2.groups_below(module):
            fsdp2.set_reductions(group, (False, False))
        yield
    finally:
        _plain_inside[module] -= 1
        if not _plain_inside[module]:
            del _plain_inside[module]
        for group in fsdp2.groups_below(module):
            fsdp2.set_reductions(group, before.get(id(group), (True, True)))


def follow_no_sync(root: nn.Module) -> None:
    """Switches reductions off in a model that was sharded inside of a `no_sync` block."""
    for module in set(_plain_inside).intersection(root.modules()):
        for group in fsdp2.groups_below(module):
            fsdp2.set_reductions(group, (False, False))
