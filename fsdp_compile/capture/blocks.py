"""Compiling a model unit by unit, so that like blocks share one compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fsdp_compile._torch import fully_shard as fsdp2
from fsdp_compile._torch.dynamo import compile_in_place


def compile_blocks(model: nn.Module, **settings: Any) -> nn.Module:
    """Compiles each outermost sharded module below the root in place, and leaves the root's own code to Python.

    Args:
        model: A model that `fully_shard` was called on.
        settings: As for `torch.compile`, such as `options={"reshard_after_forward": 8}`.

    Returns:
        The model.

    Example:
        >>> fsdp_compile.fully_shard(model)
        >>> fsdp_compile.compile_blocks(model)
        >>> model(inputs).backward()
    """
    for module in _outermost(model):
        compile_in_place(module, **settings)
    return model


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if fsdp2.state_of(child) is not None:
            yield child
        else:
            yield from _outermost(child)
