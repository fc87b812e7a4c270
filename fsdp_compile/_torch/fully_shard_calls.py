"""Private names of torch's `fully_shard` (FSDP2) that choosing units and calling it needs."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init, _fully_shard
from torch.distributed.fsdp.wrap import _recursive_wrap as recursive_wrap

from fsdp_compile._torch import fully_shard as fsdp2

_APPLIED: Any = inspect.unwrap(fully_shard)
"""What torch keeps the state of a call of its `fully_shard` under."""
_HOOKS_OF = ("torch.distributed.fsdp._fully_shard", "fsdp_compile.fsdp2")
"""Modules of Python whose functions are FSDP2's hooks, or wrap these."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_post_hooks")
"""Attributes of a module: hooks that gather its parameters, or take them for sharded ones."""
_PLACEMENT_RESULT: Any = getattr(_fsdp_common, "ShardPlacementResult", ())
"""A placement with a mesh, which torch has from 2.12 on."""


def has_call(module: nn.Module) -> bool:
    """Whether torch's `fully_shard` was called on a module."""
    return fsdp2.state_of(module) is not None


def is_closed(module: nn.Module) -> bool:
    """Whether calls on modules around this one leave its parameters alone."""
    return has_call(module) or not _fsdp_common._is_composable_with_fsdp(module)


def is_replicated(module: nn.Module) -> bool:
    """Whether composable `replicate` was applied to a module: the DDP in it is made in the first forward."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, {})


def chosen_mesh(result: object) -> tuple[DeviceMesh, Any] | None:
    """The mesh that a result of `shard_placement_fn` says, and its `DataParallelMeshDims`; `None` if it says none.

    If that mesh was made of a whole one for these, this one.
    """
    if not isinstance(result, _PLACEMENT_RESULT):
        return None
    info: Any = result.mesh_info
    return getattr(info, "spmd_mesh", None) or info.mesh, getattr(info, "dp_mesh_dims", None)


def keep_with(module: nn.Module, name: str, value: object) -> None:
    """`keep` for the call on `module`."""
    fsdp2.keep(_state(module), name, value)


def kept_with(module: nn.Module, name: str) -> Any:
    """What `keep_with` kept for the call on `module`; `None` if nothing, or without a call."""
    return fsdp2.kept(fsdp2.state_of(module), name)


def derive_class(module: nn.Module) -> None:
    """Makes FSDP2's class of a module whose memory layout is not `nn.Module`'s, as of `class M(ABC, nn.Module)`.

    Python assigns `__class__` only between classes of one layout, which is that of the first bases.
    """
    cls: Any = type(module)
    first = cls
    while issubclass(first, nn.Module):
        first = first.__base__
    known = _fully_shard.get_cls_to_fsdp_cls()
    if first is not object and not first.__dictoffset__ and cls not in known:
        bases = type(first)(first.__name__, (first,), {}), FSDPModule, cls
        known[cls] = type(cls)(f"FSDP{cls.__name__}", bases, {"__deepcopy__": _fully_shard._unimplemented_deepcopy})


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
    for state in dict.fromkeys(map(_state, others)):
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for module in state._modules:
            del _module_state_mapping[module]
            del module.__dict__[STATE_KEY][_APPLIED]
            del module.__dict__[REGISTRY_KEY][_APPLIED.__name__]
            module.__class__ = fsdp2.class_below(type(module))
        for group in fsdp2.groups_of(state):
            same = next((each for each in fsdp2.groups_of(target) if _may_be_one(each, group)), None)
            if same is not None:
                same.fsdp_params.extend(group.fsdp_params)
                continue
            group.modules = target._modules
            if fsdp2.has_group_lists():
                target._fsdp_param_groups.append(group)
            else:
                target._fsdp_param_group = group


def cast_inputs(module: nn.Module, *, casts: bool) -> None:
    """Changes `MixedPrecisionPolicy.cast_forward_inputs` of the call on `module`."""
    state = _state(module)
    state._mp_policy = dataclasses.replace(state._mp_policy, cast_forward_inputs=casts)


def reduction_of(module: nn.Module) -> tuple[bool, float | None]:
    """Whether the call on `module` reduces gradients over all of its mesh, and what `set_gradient_divide_factor` set.

    As by default if it has sharded no parameters.
    """
    group = next(iter(fsdp2.groups_of(_state(module))), None)
    return (True, None) if group is None else (all(fsdp2.reductions(group)), group.gradient_divide_factor)


@contextlib.contextmanager
def plain_class(module: nn.Module) -> Iterator[None]:
    """A context in which methods that FSDP2 overrides, such as what `to_empty()` calls, are those of `nn.Module`."""
    sharded = type(module)
    module.__class__ = fsdp2.class_below(type(module))
    try:
        yield
    finally:
        module.__class__ = sharded


def _state(module: nn.Module) -> Any:
    state = fsdp2.state_of(module)
    assert state is not None, type(module).__name__
    return state


def _may_be_one(first: Any, second: Any) -> bool:
    trained = [p.sharded_param for p in (*first.fsdp_params, *second.fsdp_params) if p.sharded_param.requires_grad]
    return first.mesh_info == second.mesh_info and len({p.dtype for p in trained}) <= 1


@contextlib.contextmanager
def without_fsdp2_hooks(module: nn.Module) -> Iterator[None]:
    """A context in which FSDP2 takes no part in forwards and loads of `module` and what is below it."""
    stopped: list[tuple[Any, dict[int, Any]]] = []
    for each in module.modules():
        for hooks in (getattr(each, kind) for kind in _HOOKS):
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
    return str(getattr(hook, "__module__", "")).startswith(_HOOKS_OF)


def forward_in_progress(module: nn.Module) -> bool:
    """Whether a forward of a model that `module` or one of its parts belongs to has begun, and not ended."""
    return any(state._state_ctx.iter_forward_root is not None for state in fsdp2.states_below(module))
