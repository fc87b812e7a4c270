"""Reductions that users write: `register_comm_hook`, and the operators by which a graph calls such a hook.

A hook replaces the reduce-scatter over the shard group (or, where parameters are not sharded, the all-reduce over the
replicas) and the division. It is called once per unit and dtype with the full gradient in the reduce dtype: `[size *
n]`, rank after rank, padding zero.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp_compile.errors import ConfigError

CommHook = Callable[..., None]
"""`hook(state, gradient, output)` writes this rank's `[n]` into `output`; `hook(state, gradient)` works in place."""


@dataclasses.dataclass(frozen=True, eq=False)
class Registered:
    """A hook with its state, and the key that names it in graphs, the same on every rank.

    The key is empty for a hook of torch's own that graphs have as nodes.
    """

    key: str
    hook: CommHook
    state: object

    @property
    def compresses_to(self) -> torch.dtype | None:
        """The dtype of messages, if the hook is one of torch's own that casts them, as nodes."""
        from torch.distributed.algorithms._comm_hooks import default_hooks

        if self.key:
            return None
        known = {default_hooks.bf16_compress_hook: torch.bfloat16, default_hooks.fp16_compress_hook: torch.float16}
        return known.get(self.hook)


_RUNS_EACH_TIME = (torch.Tag.cudagraph_unsafe,)
"""A hook is code of the user's: a CUDA graph, which repeats kernels, would run it once."""
_registered: weakref.WeakValueDictionary[str, Registered] = weakref.WeakValueDictionary()
"""By key, for as long as a unit refers to them."""


def register(hook: CommHook, state: object) -> Registered:
    """Assigns a key to a hook; keys are numbered in the order of registration, alike on every rank."""
    key = next(k for k in (f"fsdp.hook.{n}" for n in itertools.count()) if k not in _registered)
    made = Registered(key, hook, state)
    _registered[key] = made
    return made


def check_signature(hook: object, arguments: Sequence[str]) -> None:
    """Raises `ConfigError` for a hook that cannot be called with the given arguments."""
    problem: str | None = None
    if not callable(hook):
        problem = f"is a {type(hook).__name__}, which cannot be called"
    else:
        try:
            inspect.signature(hook).bind(*arguments)
        except ValueError:
            pass  # written in C: its arguments are not known
        except TypeError as error:
            problem = f"cannot be called with {len(arguments)} arguments: {error}"
    if problem is not None:
        raise ConfigError(
            f"the hook {problem}",
            where="register_comm_hook(model, hook)",
            instead=f"a function of ({', '.join(arguments)})",
        )


def _find(key: str) -> Registered:
    found = _registered.get(key)
    if found is None:
        raise ConfigError(
            "a compiled graph calls a communication hook whose model is gone",
            where=key,
            instead="keep the model for as long as its compiled functions run",
        )
    return found


@torch.library.custom_op("fsdp_compile::hook_scatter", mutates_args=(), tags=_RUNS_EACH_TIME)
def hook_scatter(message: torch.Tensor, size: int, key: str) -> torch.Tensor:
    """Calls a hook with a full gradient of `[size * n]`; returns this rank's `[n]` of its result."""
    found = _find(key)
    output = message.new_empty(message.numel() // size)
    found.hook(found.state, message.clone(), output)  # hooks divide in place
    return output.to(message.dtype)


@hook_scatter.register_fake
def _(message: torch.Tensor, size: int, _key: str) -> torch.Tensor:
    return message.new_empty(message.shape[0] // size)


@torch.library.custom_op("fsdp_compile::hook_scatter_coalesced", mutates_args=(), tags=_RUNS_EACH_TIME)
def hook_scatter_coalesced(messages: Sequence[torch.Tensor], size: int, key: str) -> list[torch.Tensor]:
    """The same for several messages, with one call."""
    # Each rank's parts of all messages are neighbours: a hook that splits by rank finds them.
    packed = torch.cat([message.view(size, -1) for message in messages], 1).view(-1)
    output = hook_scatter(packed, size, key)
    return [part.clone() for part in output.split([message.numel() // size for message in messages])]


@hook_scatter_coalesced.register_fake
def _(messages: Sequence[torch.Tensor], size: int, _key: str) -> list[torch.Tensor]:
    return [message.new_empty(message.shape[0] // size) for message in messages]


@torch.library.custom_op("fsdp_compile::hook_reduce", mutates_args=(), tags=_RUNS_EACH_TIME)
def hook_reduce(message: torch.Tensor, key: str) -> torch.Tensor:
    """Calls a hook with a full gradient that is not sharded; returns its result."""
    found = _find(key)
    gradient = message.clone()
    # In place, and a custom operator may not change its input.
    found.hook(found.state, gradient)
    return gradient.to(message.dtype)


@hook_reduce.register_fake
def _(message: torch.Tensor, _key: str) -> torch.Tensor:
    return torch.empty_like(message)


@torch.library.custom_op("fsdp_compile::hook_reduce_coalesced", mutates_args=(), tags=_RUNS_EACH_TIME)
def hook_reduce_coalesced(messages: Sequence[torch.Tensor], key: str) -> list[torch.Tensor]:
    """The same for several messages, with one call."""
    output = hook_reduce(torch.cat(list(messages)), key)
    return [part.clone() for part in output.split([message.numel() for message in messages])]


@hook_reduce_coalesced.register_fake
def _(messages: Sequence[torch.Tensor], _key: str) -> list[torch.Tensor]:
    return [torch.empty_like(message) for message in messages]


def is_plain_average(hook: object, state: Any, ranks: Sequence[int], stored: torch.dtype, *, split: bool) -> bool:
    """Whether a hook is one of torch's own that does the same as a reduction of ours in some dtype.

    That averages over the world's `ranks`, over which parameters, of dtype `stored`, are `split` or not.
    """
    from torch.distributed.algorithms._comm_hooks import default_hooks

    plain = default_hooks.reduce_scatter_hook if split else default_hooks.allreduce_hook
    if hook not in (plain, default_hooks.bf16_compress_hook, default_hooks.fp16_compress_hook):
        return False
    if state is None:
        return True
    if type(state) not in (default_hooks.DefaultState, default_hooks.LowPrecisionState):
        return False
    divided_by = state.gradient_predivide_factor * state.gradient_postdivide_factor
    return (
        torch.distributed.get_process_group_ranks(state.process_group) == list(ranks)
        and divided_by == len(ranks)
        and getattr(state, "parameter_type", stored) == stored
    )


HOOK_SCATTER = torch.ops.fsdp_compile.hook_scatter.default
HOOK_SCATTER_COALESCED = torch.ops.fsdp_compile.hook_scatter_coalesced.default
HOOK_REDUCE = torch.ops.fsdp_compile.hook_reduce.default
HOOK_REDUCE_COALESCED = torch.ops.fsdp_compile.hook_reduce_coalesced.default
