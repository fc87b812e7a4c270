"""Private names of torch's `fully_shard` (FSDP2): what its calls on a model have made, read and removed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _get_module_state, _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from fsdp_compile._torch.composable import APPLIED

_GROUPS, _GROUP = "_fsdp_param_groups", "_fsdp_param_group"
"""Attribute of FSDP2's state of a module; the second up to 2.11."""
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Attributes that FSDP2 sets on every module below a call, for Dynamo."""
_COLLECTIVES: dict[str, tuple[str, Any]] = {
    "SymmMemAllGather": ("set_symm_mem_for_comm", "NCCL"),
    "SymmMemReduceScatter": ("set_symm_mem_for_comm", "NCCL"),
    "ProcessGroupAllocAllGather": ("set_allocate_memory_from_process_group_for_comm", True),
    "ProcessGroupAllocReduceScatter": ("set_allocate_memory_from_process_group_for_comm", True),
}
_SETTINGS: tuple[tuple[str, Any, str, bool], ...] = (
    ("reshard_after_backward", True, "set_reshard_after_backward", True),
    ("gradient_divide_factor", None, "set_gradient_divide_factor", False),
    ("force_sum_reduction_for_comms", False, "set_force_sum_reduction_for_comms", False),
    ("unshard_in_backward", True, "set_unshard_in_backward", False),
    ("_all_reduce_hook", None, "set_all_reduce_hook", False),
    ("reduce_scatter_unused_params", False, "set_reduce_scatter_unused_params", True),
    ("reduce_scatter_max_input_buffers", 1, "set_reduce_scatter_max_input_buffers", True),
)
"""Attribute of FSDP2's parameter group, what it is by default, the method that sets it, and whether that recurses."""
_OF_STATE = (
    "_auto_reshard_after_forward",
    "_is_root",
    "_modules",
    "_mp_policy",
    "_post_forward_hook_handle",
    "_pre_forward_hook_handle",
    "_state_ctx",
    "_states_to_backward_prefetch",
    "_states_to_forward_prefetch",
    "_training_state",
)
_OF_CONTEXT = ("all_states", "is_last_backward", "iter_forward_root", "post_optim_event")
_OF_GROUP = (
    "_all_gather_comm",
    "_module_to_pre_load_state_dict_hook_handle",
    "_module_to_pre_save_state_dict_hook_handle",
    "_partial_reduce_output",
    "_reduce_scatter_comm",
    "_training_state",
    "all_reduce_grads",
    "comm_ctx",
    "fsdp_params",
    "mesh_info",
    "offload_policy",
    "post_forward_mesh_info",
    "pre_backward",
    "reduce_grads",
    "reshard",
    "wait_for_unshard",
)
_OF_PARAM = (
    "_module_info",
    "_post_load_hook_handle",
    "fsdp_placement",
    "unsharded_accumulated_grad",
)
"""Attributes that are read here without asking whether there are any: a torch may lack them."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A method of `FSDPModule` that was called, or has to be called for the same effect.

    Attributes:
        recurses: Whether the method has an argument `recurse`.
    """

    method: str
    value: Any
    recurses: bool = False


@dataclasses.dataclass(frozen=True)
class WrappedParam:
    """A parameter that FSDP2 has sharded.

    Attributes:
        module_refs: Every (module, attribute) that registers it.
        parameter: What is registered at the first of these places now.
        dim: The dimension on which it is sharded.
    """

    module_refs: tuple[tuple[nn.Module, str], ...]
    parameter: nn.Parameter
    dim: int


class WrappedCall:
    """One call of torch's `fully_shard`: its modules, what it was called with, and what was set since.

    Attributes:
        modules: Those that it was called on.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self.modules: tuple[nn.Module, ...] = tuple(getattr(state, "_modules", ()))

    def missing_names(self) -> list[str]:
        """Attributes of torch's objects that this torch does not have, and without which nothing else works."""
        missing = _missing([self._state], [*_OF_STATE, *([] if hasattr(self._state, _GROUP) else [_GROUPS])])
        if not missing:
            missing = _missing([self._state._state_ctx], _OF_CONTEXT) + _missing(self._groups, _OF_GROUP)
        if not missing:
            missing = _missing([param for group in self._groups for param in group.fsdp_params], _OF_PARAM)
        return missing

    @property
    def is_fully_shard(self) -> bool:
        """Whether it was `fully_shard`, and not another API that is built on it (`replicate`)."""
        return type(self._state) is FSDPState

    @property
    def is_idle(self) -> bool:
        """Whether no forward and no backward of it is running."""
        return all(part._training_state is TrainingState.IDLE for part in (self._state, *self._groups))

    @property
    def is_last_backward(self) -> bool:
        """What `set_is_last_backward` was called with."""
        return bool(self._state._state_ctx.is_last_backward)

    @property
    def has_several_meshes(self) -> bool:
        """Whether its parameters are sharded over several meshes, or over the dimensions of a larger one."""
        return len(self._groups) > 1 or any(
            getattr(group.mesh_info, "is_spmd_mesh", False)
            or any(p.mesh_info is not group.mesh_info for p in group.fsdp_params if hasattr(p, "mesh_info"))
            for group in self._groups
        )

    @property
    def model(self) -> list[tuple[nn.Module, ...]]:
        """The modules of every call on the model that a forward has found this one in; none before the first."""
        return [tuple(state._modules) for state in self._state._state_ctx.all_states]

    @property
    def mesh(self) -> DeviceMesh | None:
        """Its mesh; `None` if it has no parameters of its own."""
        return next((group.mesh_info.mesh for group in self._groups), None)

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """Its argument."""
        policy: MixedPrecisionPolicy = self._state._mp_policy
        return policy

    @property
    def offload_policy(self) -> OffloadPolicy:
        """Its argument."""
        return next((group.offload_policy for group in self._groups), OffloadPolicy())

    @property
    def reshard_after_forward(self) -> bool | int | None:
        """Its argument, or what was set since."""
        if self._state._auto_reshard_after_forward:
            return None
        for group in self._groups:
            after = group.post_forward_mesh_info
            if after is None:
                return False
            if after is not group.mesh_info:
                return int(after.shard_mesh_size)
        return True

    @property
    def has_unreduced_gradients(self) -> bool:
        """Whether gradients wait for their reduction, as those of `set_requires_gradient_sync(False)` do."""
        return any(
            group._partial_reduce_output is not None
            or any(
                param.unsharded_accumulated_grad is not None
                or (hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None)
                for param in group.fsdp_params
            )
            for group in self._groups
        )

    def reshard(self) -> None:
        """Registers the sharded parameters, as they are between steps; of tied ones the one at their first place."""
        for part in (self._state, *self._groups):  # a forward has begun that will run without it
            part._training_state = TrainingState.IDLE
        self._state._state_ctx.iter_forward_root = None
        for group in self._groups:
            group.wait_for_unshard()
            group.reshard()
        for param in self.params():
            for module, attribute in param.module_refs:
                module._parameters[attribute] = param.parameter

    def params(self) -> Iterator[WrappedParam]:
        """Its parameters, which must be resharded."""
        for group in self._groups:
            for param in group.fsdp_params:
                info = param._module_info
                shared = zip(info.shared_modules, info.shared_param_names, strict=True)
                first = info.module._parameters[info.param_name]
                yield WrappedParam(((info.module, info.param_name), *shared), first, param.fsdp_placement.dim)

    def settings(self) -> list[Setting]:
        """What differs from how FSDP2 makes a model, but for arguments of its `fully_shard`."""
        found = []
        context = self._state._state_ctx
        if context.post_optim_event is not None and self._state._is_root is not False:
            found.append(Setting("set_post_optim_event", context.post_optim_event))
        for group in self._groups:
            found.extend(_settings_of(group))
        for name in ("forward", "backward"):
            states = getattr(self._state, f"_states_to_{name}_prefetch")
            if states:
                found.append(Setting(f"set_modules_to_{name}_prefetch", [state._modules[0] for state in states]))
        return found

    def remove(self, refuse_backward: Callable[[], NoReturn]) -> None:
        """Removes it from its modules, which keep the sharded parameters as DTensors of their own.

        Args:
            refuse_backward: Called by backward passes of forwards from before, which nothing would reduce.
        """
        self._state._pre_forward_hook_handle.remove()
        self._state._post_forward_hook_handle.remove()
        for group in self._groups:
            _remove_group(group, refuse_backward)
        # These two refer to one another.
        self._state._state_ctx.all_states.clear()
        for module in self.modules:
            del _module_state_mapping[module]
            del module.__dict__[STATE_KEY][APPLIED]
            del module.__dict__[REGISTRY_KEY][APPLIED.__name__]
            # FSDP2 has put it into a class of its own.
            module.__class__ = original_class(module)  # type: ignore[assignment]
            for part in module.modules():
                for mark in _MARKS:
                    part.__dict__.pop(mark, None)

    @property
    def _groups(self) -> list[Any]:
        groups = getattr(self._state, _GROUPS, None)
        if groups is None:
            groups = [getattr(self._state, _GROUP)]
        return [group for group in groups if group is not None]


def wrapped_calls(root: nn.Module) -> list[WrappedCall]:
    """The calls of torch's `fully_shard`, and of APIs that are built on it, on modules in `root`."""
    states = (_get_module_state(module) for module in root.modules() if isinstance(module, FSDPModule))
    return [WrappedCall(state) for state in dict.fromkeys(states) if isinstance(state, FSDPState)]


def original_class(module: nn.Module) -> type | None:
    """The class of a module before FSDP2 replaced it; `None` if it was replaced once more since."""
    bases = type(module).__bases__
    return bases[1] if len(bases) == 2 and bases[0] is FSDPModule else None


def _missing(objects: Iterable[object], names: Iterable[str]) -> list[str]:
    found = (f"{type(each).__name__}.{name}" for each in objects for name in names if not hasattr(each, name))
    return list(dict.fromkeys(found))


def _settings_of(group: Any) -> Iterator[Setting]:
    if not (group.reduce_grads and group.all_reduce_grads):
        yield Setting("set_requires_gradient_sync", group.reduce_grads, recurses=True)
        yield Setting("set_requires_all_reduce", group.all_reduce_grads, recurses=True)
    for attribute, default, method, recurses in _SETTINGS:
        # Some are newer than others.
        value = getattr(group, attribute, default)
        if value != default:
            yield Setting(method, value, recurses)
    if getattr(group.mesh_info, "reduce_scatter_process_group", None) is not None:
        yield Setting("set_separate_reduce_scatter_group", value=True, recurses=True)
    for name in ("all_gather", "reduce_scatter"):
        collective = getattr(group, f"_{name}_comm")
        kind = type(collective).__name__
        if not kind.startswith("Default"):
            yield Setting(*_COLLECTIVES.get(kind, (f"set_custom_{name}", collective)))


def _remove_group(group: Any, refuse_backward: Callable[[], NoReturn]) -> None:
    def pre_backward(*_: Any) -> NoReturn:
        refuse_backward()

    for param in group.fsdp_params:
        param._post_load_hook_handle.remove()
    for handles in (
        group._module_to_pre_save_state_dict_hook_handle,
        group._module_to_pre_load_state_dict_hook_handle,
    ):
        for handle in handles.values():
            handle.remove()
        handles.clear()
    # Graphs of earlier forwards may keep the group: without parameters, and so without their memory.
    group.fsdp_params.clear()
    group.pre_backward = pre_backward
    # A forward makes it, and without a backward it lists groups, which refer to it.
    getattr(group.comm_ctx, "post_forward_order", []).clear()
