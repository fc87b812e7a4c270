"""A hook that shards a compiled module at its first call, whatever Dynamo makes of its forward."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp_compile._torch.dynamo import skip_code
from fsdp_compile.errors import UnsupportedModelError


class Found(enum.Enum):
    """What the call of a compiled module has found to shard."""

    SHARDED = "sharded"
    """Plain parameters, which were sharded."""
    NOTHING = "nothing"
    """Nothing: it is sharded, or everything is ignored."""
    VALUES = "values"
    """Values that stand in the place of parameters for this call, or what another call will take over."""


class BeforeFirstCall:
    """A forward pre-hook of one compiled module; it stays until a call has found something to shard, or nothing at all.

    Args:
        caller: The module. Its copies are not compiled: their first call removes the hook.
        shard: Called with it. An exception reaches its caller, and the next call tries again.
    """

    def __init__(self, caller: nn.Module, shard: Callable[[Any], Found]) -> None:
        self.caller = weakref.ref(caller)
        self.shard = shard
        caller.register_forward_pre_hook(self, prepend=True)

    def __call__(self, caller: nn.Module, _args: Any) -> None:
        """Shards a module that is about to be called."""
        # Inside of other compiled code nothing is called by itself: the backend gets what that code reads.
        if not torch.compiler.is_compiling():
            _shard_or_remove(self, caller)

    def __deepcopy__(self, _memo: dict[int, Any]) -> BeforeFirstCall:
        return self

    def __reduce__(self) -> NoReturn:
        raise UnsupportedModelError(
            "a model that is compiled in place is pickled before its first call, which will shard it",
            where=type(self.caller()).__name__,
            instead="pickle it before model.compile(backend='fsdp'), and compile what is loaded; or model.state_dict()",
        )


def remove_hook(module: nn.Module) -> None:
    """Removes the hook of a module that is sharded, or compiled in another way, if it has one."""
    for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, BeforeFirstCall)]:
        del module._forward_pre_hooks[key]


@torch.compiler.disable
def _shard_or_remove(hook: BeforeFirstCall, caller: nn.Module) -> None:
    compiled = hook.caller()
    if caller is compiled:
        if hook.shard(caller) is not Found.VALUES:
            remove_hook(caller)
    elif compiled is None or caller._forward_pre_hooks is not compiled._forward_pre_hooks:  # else a shallow copy
        remove_hook(caller)


skip_code(BeforeFirstCall.__call__.__code__)
