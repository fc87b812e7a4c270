"""Private names of torch's `fully_shard` (FSDP2) that choosing units and calling it needs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.fsdp._fully_shard._fsdp_common import _is_composable_with_fsdp
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state

from fsdp_compile._torch.composable import APPLIED

_SETTINGS, _NOTES = "_fsdp_compile_settings", "_fsdp_compile_notes"
"""Attributes of FSDP2's state of a module that are this package's."""


# What choosing units reads.


def has_call(module: nn.Module) -> bool:
    """Whether torch's `fully_shard` was called on a module."""
    return _get_module_fsdp_state(module) is not None


def is_closed(module: nn.Module) -> bool:
    """Whether calls on modules around this one leave its parameters alone."""
    return has_call(module) or not _is_composable_with_fsdp(module)


def same_call(modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Modules on which torch's function was called, those of one call together."""
    calls: dict[Any, list[nn.Module]] = {}
    for module in modules:
        if (state := _get_module_fsdp_state(module)) is not None:
            calls.setdefault(state, []).append(module)
    return list(calls.values())


# What the package keeps on FSDP2's state of a call.


def set_settings(module: nn.Module, settings: object) -> None:
    """Keeps settings of this package for the call on `module`."""
    setattr(_state(module), _SETTINGS, settings)


def settings_of(module: nn.Module) -> Any:
    """What `set_settings` kept for the call on `module`; `None` if nothing, or without a call."""
    return getattr(_get_module_fsdp_state(module), _SETTINGS, None)


def set_note(module: nn.Module, note: object) -> None:
    """Keeps one more object of this package as long as the call on `module`; `None` for none."""
    setattr(_state(module), _NOTES, note)


def note_of(module: nn.Module) -> Any:
    """What `set_note` kept; `None` if nothing, or without a call."""
    return getattr(_get_module_fsdp_state(module), _NOTES, None)


# What a call makes beyond torch's own.


@functools.cache
def has_group_lists() -> bool:
    """Whether a unit may have several parameter groups, as from torch 2.12 on."""
    return hasattr(FSDPState(), "_fsdp_param_groups")


def add_group(
    modules: Sequence[nn.Module],
    params: list[nn.Parameter],
    *,
    mesh: Any,
    dp_mesh_dims: Any,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    mp_policy: Any,
    offload_policy: Any,
) -> None:
    """Gives the call on `modules` one more parameter group, of parameters that it ignored."""
    reshard = True if reshard_after_forward is None else reshard_after_forward
    mesh_info: Any = _fsdp_init._get_mesh_info(mesh, dp_mesh_dims)
    device = _fsdp_init._get_device_from_mesh(mesh)
    _fsdp_init._move_states_to_device(params, [], device)
    _fsdp_init._init_param_group(
        _state(modules[0]),
        params,
        tuple(modules),
        mesh_info,
        _fsdp_init._get_post_forward_mesh_info(reshard, mesh_info),
        device,
        shard_placement_fn,
        mp_policy,
        offload_policy,
        reshard_after_forward=reshard,
    )


def merge_calls(into: nn.Module, others: Iterable[nn.Module]) -> None:
    """Makes the parameters of calls on `others`, which no forward has run yet, those of the call on `into`."""
    target = _state(into)
    for state in dict.fromkeys(_state(module) for module in others):
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for module in state._modules:
            del _module_state_mapping[module]
            del module.__dict__[STATE_KEY][APPLIED]
            del module.__dict__[REGISTRY_KEY][APPLIED.__name__]
            module.__class__ = _plain(module)
        for group in _groups(state):
            same = next((each for each in _groups(target) if _may_be_one(each, group)), None)
            if same is not None:
                same.fsdp_params.extend(group.fsdp_params)
                continue
            group.modules = target._modules
            if has_group_lists():
                target._fsdp_param_groups.append(group)
            else:
                target._fsdp_param_group = group


def cast_inputs(module: nn.Module, *, casts: bool) -> None:
    """Changes `MixedPrecisionPolicy.cast_forward_inputs` of the call on `module`."""
    state = _state(module)
    state._mp_policy = dataclasses.replace(state._mp_policy, cast_forward_inputs=casts)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How a unit's gradients are reduced now.

    Attributes:
        runs: Whether they are reduced over all dimensions of the mesh, or wait.
        divide_by: What was set with `set_gradient_divide_factor`.
    """

    runs: bool
    divide_by: float | None


def reduction_of(module: nn.Module) -> Reduction | None:
    """How the call on `module` reduces gradients; `None` if it has sharded no parameters."""
    group = next(_groups(_state(module)), None)
    if group is None:
        return None
    return Reduction(group.reduce_grads and group.all_reduce_grads, group.gradient_divide_factor)


def is_offloaded(module: nn.Module) -> bool:
    """Whether the call on `module` keeps shards on the host; not without a call."""
    state = _get_module_fsdp_state(module)
    return state is not None and any(isinstance(g.offload_policy, CPUOffloadPolicy) for g in _groups(state))


@contextlib.contextmanager
def plain_class(module: nn.Module) -> Iterator[None]:
    """A context in which methods that FSDP2 overrides, such as what `to_empty()` calls, are those of `nn.Module`."""
    sharded = type(module)
    module.__class__ = _plain(module)
    try:
        yield
    finally:
        module.__class__ = sharded


def _plain(module: nn.Module) -> type:
    """The class of a module before FSDP2 put it into a class of its own."""
    bases = type(module).__mro__
    return bases[bases.index(FSDPModule) + 1] if FSDPModule in bases else type(module)


def _state(module: nn.Module) -> Any:
    state = _get_module_fsdp_state(module)
    assert state is not None, type(module).__name__
    return state


def _groups(state: Any) -> Iterator[Any]:
    groups = state._fsdp_param_groups if has_group_lists() else [state._fsdp_param_group]
    return iter([group for group in groups if group is not None])


def _may_be_one(first: Any, second: Any) -> bool:
    trainable = [p.sharded_param for p in (*first.fsdp_params, *second.fsdp_params) if p.sharded_param.requires_grad]
    return first.mesh_info == second.mesh_info and len({p.dtype for p in trainable}) <= 1
