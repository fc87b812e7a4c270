"""Private names of torch's FSDP2 about its hooks on modules, and about whether one of its forwards runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

_OWNERS = ("torch.distributed.fsdp._fully_shard", "fsdp_compile.fsdp2")
"""Modules of Python whose functions are FSDP2's hooks, or wrap these."""
_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_post_hooks")
"""Attributes of a module: hooks that gather its parameters, or take them for sharded ones."""


@contextlib.contextmanager
def without_fsdp2_hooks(module: nn.Module) -> Iterator[None]:
    """A context in which FSDP2 takes no part in forwards and loads of `module` and what is below it."""
    stopped: list[tuple[Any, dict[int, Any]]] = []
    for each in module.modules():
        for hooks in (getattr(each, kind) for kind in _KINDS):
            if any(_is_of_fsdp2(hook) for hook in hooks.values()):
                stopped.append((hooks, dict(hooks)))
                for key in [key for key, hook in hooks.items() if _is_of_fsdp2(hook)]:
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, before in stopped:
            inside = dict(hooks)
            hooks.clear()  # the dict itself, which the handles of hooks refer to; in the order of before
            hooks.update({key: hook for key, hook in before.items() if key in inside or _is_of_fsdp2(hook)} | inside)


def _is_of_fsdp2(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_OWNERS)


def forward_in_progress(module: nn.Module) -> bool:
    """Whether a forward of a model that `module` or one of its parts belongs to has begun, and not ended."""
    parts = (part for part in module.modules() if isinstance(part, FSDPModule))
    return any(fully_shard.state(part)._state_ctx.iter_forward_root is not None for part in parts)  # type: ignore[attr-defined]
