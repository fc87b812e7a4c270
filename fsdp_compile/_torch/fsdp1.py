"""FSDP1's static methods, which take any module and look for modules of FSDP1 in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

__all__ = ["call_before"]


def call_before(names: Iterable[str], check: Callable[[str, nn.Module], None]) -> None:
    """Makes static methods of FSDP1 call `check` with their name and the module that they are given first.

    They find nothing in a module that FSDP1 has not wrapped, which some take for an error and some for nothing to do.
    """
    for name in names:
        inner = getattr(FullyShardedDataParallel, name, None)
        if inner is not None:
            setattr(FullyShardedDataParallel, name, staticmethod(_checked(name, inner, check)))


def _checked(name: str, inner: Callable[..., Any], check: Callable[[str, nn.Module], None]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def checked(*args: Any, **kwargs: Any) -> Any:
        module = next((each for each in (*args, *kwargs.values()) if isinstance(each, nn.Module)), None)
        if module is not None:
            check(name, module)
        return inner(*args, **kwargs)

    return checked
