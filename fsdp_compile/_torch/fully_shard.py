"""Private names of torch's FSDP2: its states, parameter groups, parameters and hooks.

    FSDPState            one call of `fully_shard`: its modules, policy, hooks, training state
    FSDPParamGroup       the parameters of a call that are gathered together: mesh, flags of accumulation
    FSDPParam            one parameter: its DTensor, its shard, and the modules that register it

Everything that this package reads or changes of these objects it does here, in `fully_shard_params.py` (parameters)
and in `fully_shard_calls.py` (calls of `fully_shard`). `tests/_torch/test_fully_shard_names.py` lists the attributes
that these files use: what to read again for a new torch.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.autograd import is_saved_by_autograd
from fsdp_compile._torch.fully_shard_params import TorchParam, end_unshard

MANAGED = "_is_fsdp_managed_module"
"""FSDP2's mark on each module of a sharded model; Dynamo guards marked modules in a way of its own."""
TorchGroup = Any
"""A `FSDPParamGroup` of torch."""
PreHook = Callable[[nn.Module, Any, Any], Any]
PostHook = Callable[[nn.Module, Any, Any], Any]


def state_of(module: nn.Module) -> FSDPState | None:
    """FSDP2's state of a module that its `fully_shard` was called on; not that of `replicate_with_fsdp`."""
    try:
        found = fully_shard.state(module)  # type: ignore[attr-defined]
    except (AssertionError, ValueError, AttributeError):
        return None
    return found if isinstance(found, FSDPState) else None


def sharded_modules() -> list[nn.Module]:
    """All modules of the process that FSDP2's `fully_shard` was called on."""
    return [module for module in list(_module_state_mapping) if state_of(module) is not None]


lazy_init: Callable[[FSDPState], None] = methodcaller("_lazy_init")
"""Finishes FSDP2's initialization of the model whose root has this state, as its first forward does."""


def lazy_init_on_meta(state: FSDPState) -> None:
    """`lazy_init` for a model of which no value is ever read: FSDP2 refuses parameters that are on meta."""
    for group in groups_below(state._modules[0]):
        group._validate_no_meta_params = group._validate_cpu_offload_params = lambda: None
    state._lazy_init()


def class_below(made: type) -> type:
    """The user's class, from which FSDP2 has derived one for modules that `fully_shard` was called on."""
    classes = made.__mro__
    return classes[classes.index(FSDPModule) + 1] if FSDPModule in classes else made


def states_of_model(state: FSDPState) -> list[FSDPState]:
    """The states of the initialized model that a state belongs to, in the order of their modules."""
    return list(dict.fromkeys(state._state_ctx.all_states))  # torch 2.11 has that of several modules once for each


def is_initialized(state: FSDPState) -> bool:
    """Whether FSDP2's lazy initialization has run."""
    return state._is_root is not None


def is_inner(state: FSDPState) -> bool:
    """Whether an initialized state is not that of its model's outermost module."""
    return state._is_root is False


def groups_of(state: FSDPState) -> list[TorchGroup]:
    """The parameter groups of a state: one, or one for each mesh; none if it has no parameters of its own."""
    if has_group_lists():
        return list(state._fsdp_param_groups)
    only = state._fsdp_param_group  # up to torch 2.11
    return [] if only is None else [only]


def states_below(module: nn.Module) -> list[FSDPState]:
    """The states of a module and of those in it, each once, the outermost first."""
    return list(dict.fromkeys(state for part in module.modules() if (state := state_of(part)) is not None))


def groups_below(module: nn.Module) -> list[TorchGroup]:
    """The parameter groups of a module, and of those in it."""
    return [group for state in states_below(module) for group in groups_of(state)]


@functools.cache
def has_group_lists() -> bool:
    """Whether a unit may have several parameter groups, as from torch 2.12 on."""
    return hasattr(FSDPState(), "_fsdp_param_groups")


modules_of: Callable[[FSDPState], tuple[nn.Module, ...]] = attrgetter("_modules")
"""The modules that one call of `fully_shard` was given."""
policy_of: Callable[[FSDPState], Any] = attrgetter("_mp_policy")
"""The `MixedPrecisionPolicy` of a state."""
training_state: Callable[[FSDPState], TrainingState] = attrgetter("_training_state")
"""Where a state is in its step."""
prefetched: Callable[[FSDPState], tuple[Sequence[FSDPState], Sequence[FSDPState]]] = attrgetter(
    "_states_to_forward_prefetch", "_states_to_backward_prefetch"
)
"""The states whose units are to be gathered early, where this one is used: in forward, and in backward."""
is_last_backward: Callable[[FSDPState], bool] = attrgetter("_state_ctx.is_last_backward")
"""Whether the next backward is the last one of a step (`set_is_last_backward`)."""
modules_to_run: Callable[[FSDPState], set[nn.Module]] = attrgetter("_modules_to_run_forward")
"""The modules of a call on several that have not ended in this forward; empty if none or all have."""
end_with_backward: Callable[[FSDPState], None] = methodcaller("_register_root_post_backward_final_callback")
"""Makes FSDP2 end its part of a backward, as its own hooks do where the output of the root comes from them."""


def keep(state: FSDPState, name: str, value: object) -> None:
    """Keeps an object of this package as long as a state."""
    setattr(state, f"_fsdp_compile_{name}", value)


def kept(state: FSDPState | None, name: str) -> Any:
    """What `keep` kept under a name; `None` if nothing, or without a state."""
    return getattr(state, f"_fsdp_compile_{name}", None)


def own_setting(state: FSDPState, name: str, *, default: Any) -> Any:
    """A setting of this package's `fully_shard` for which FSDP2 has no place."""
    return getattr(kept(state, "settings"), name, default)


def wait_for_optimizer(state: FSDPState) -> None:
    """Makes what comes next on this stream wait for the event of `set_post_optim_event`, as FSDP2's gathers do."""
    context = state._state_ctx
    if context.post_optim_event is not None:
        context.post_optim_event.wait()
        context.post_optim_event = None


def leave_forward(state: FSDPState) -> None:
    """Ends a forward that FSDP2's pre-forward has begun, and whose unit it no longer gathers."""
    state._training_state = TrainingState.IDLE
    state._modules_to_run_forward.clear()  # else the root would end it, and gather it in backward
    for group in groups_of(state):
        group._training_state = TrainingState.IDLE
    if state._state_ctx.iter_forward_root is state:
        state._state_ctx.iter_forward_root = None


def replace_hooks(state: FSDPState, pre: Callable[[PreHook], PreHook], post: Callable[[PostHook], PostHook]) -> None:
    """Puts what `pre` and `post` make of them in the place of FSDP2's two forward hooks, in each module of a state."""
    both = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    # A call on several modules has one handle for all of their hooks.
    ids = {handle.id for one in both for handle in getattr(one, "handles", (one,))}
    for module in state._modules:
        for hooks, replaced in ((module._forward_pre_hooks, pre), (module._forward_hooks, post)):
            every: dict[int, Any] = hooks
            every.update({key: replaced(hook) for key, hook in every.items() if key in ids})


def take_marks(module: nn.Module) -> None:
    """Removes FSDP2's marks for Dynamo from a module."""
    for name in (MANAGED, "_fsdp_use_orig_params"):
        module.__dict__.pop(name, None)


def set_class(module: nn.Module, made: type) -> None:
    """Gives a module another class, of the same layout."""
    module.__class__ = made


_SETTINGS = frozenset(
    {
        "reduce_grads",
        "all_reduce_grads",
        "gradient_divide_factor",
        "force_sum_reduction_for_comms",
        "post_forward_mesh_info",
        "reshard_after_backward",
        "_all_gather_comm",
        "_reduce_scatter_comm",
        "_all_reduce_hook",
        "reduce_scatter_max_input_buffers",
    }
)
"""Attributes that `set_*` methods of an `FSDPModule` change, and by which graphs differ."""


class _ObservedGroup(FSDPParamGroup):
    """A group of FSDP2 that tells an observer. Users and frameworks change settings in many ways, all of them here."""

    _fsdp_compile_observer: weakref.ref[Any]
    _fsdp_compile_asked: bool

    @torch._dynamo.disable
    def unshard(self, async_op: bool = False) -> None:  # noqa: FBT001, FBT002  torch's
        # FSDP2 itself gathers in a forward or a backward, also when it prefetches.
        is_idle = self._training_state is TrainingState.IDLE
        self._fsdp_compile_asked = is_idle or (self._fsdp_compile_asked and is_gathered(self))
        super().unshard(async_op)

    def _to_sharded(self) -> None:
        self._fsdp_compile_asked = False
        super()._to_sharded()
        if (observer := self._fsdp_compile_observer()) is not None:
            observer.forget_gathered(self)

    def __setattr__(self, name: str, value: Any) -> None:
        changes = name in _SETTINGS and getattr(self, name) is not value
        super().__setattr__(name, value)
        if changes:
            self._tell_of_settings()

    def _set_separate_reduce_scatter_group(self, *arguments: Any) -> None:
        super()._set_separate_reduce_scatter_group(*arguments)
        self._tell_of_settings()

    def _reset_iter_state(self) -> None:
        super()._reset_iter_state()
        if (observer := self._fsdp_compile_observer()) is not None:
            observer.forget_unreduced(self)

    def _tell_of_settings(self) -> None:
        if (observer := self._fsdp_compile_observer()) is not None:
            observer.settings_changed()

    @torch._dynamo.disable
    def post_backward(self, *unused: Any) -> None:
        # At the end of a backward FSDP2 asks all groups; one that no hook has ever gathered has nothing to reduce.
        was_gathered = any(hasattr(param, "_unsharded_param") for param in self.fsdp_params)
        observer, run = self._fsdp_compile_observer(), functools.partial(super().post_backward, *unused)
        if observer is not None:
            observer.post_backward(self, run if was_gathered else None)
        elif was_gathered:
            run()


def observe(group: TorchGroup, observer: Any) -> None:
    """Tells an observer of changes of a group, from now on, as long as there is the observer.

    Its `settings_changed()` is called after one was changed by which gradients are reduced, or parameters are kept; its
    `post_backward(group, run)` when FSDP2 is about to reduce or keep gradients, in the place of `run`, which does it;
    `run` is `None` if FSDP2 cannot have any. Its `forget_unreduced(group)` follows the user's `reset_iter_state()`, and
    its `forget_gathered(group)` whatever frees gathered parameters.
    """
    group._fsdp_compile_observer = weakref.ref(observer)
    group._fsdp_compile_asked = False
    group.__class__ = _ObservedGroup


# Parameter groups.


params_of: Callable[[TorchGroup], list[TorchParam]] = attrgetter("fsdp_params")
"""The parameters of a group, in the order of registration."""
mesh_of: Callable[[TorchGroup], DeviceMesh] = attrgetter("mesh_info.mesh")
"""The data-parallel mesh of a group: the ranks of shards and of replicas, without tensor parallelism."""
is_sharded: Callable[[TorchGroup], bool] = attrgetter("is_sharded")
"""Whether the modules of a group have its sharded parameters registered."""
reduces: Callable[[TorchGroup], bool] = attrgetter("reduce_grads")
"""Whether backwards reduce the gradients of a group at all (`set_requires_gradient_sync`)."""
reductions: Callable[[TorchGroup], tuple[bool, bool]] = attrgetter("reduce_grads", "all_reduce_grads")
"""Whether backwards reduce gradients over the shard group, and over replicas."""


def is_being_gathered(group: TorchGroup) -> bool:
    """Whether a gather of a group has begun, whose result nothing has waited for."""
    return group._all_gather_result is not None


def is_gathered(group: TorchGroup) -> bool:
    """Whether FSDP2 has gathered a group, or has begun to."""
    return group._all_gather_result is not None or not group.is_sharded


def is_gathered_by_user(group: TorchGroup) -> bool:
    """Whether the user has called `unshard()`, and nothing has used or freed its result yet."""
    # FSDP2 drops what is on its way at the end of a backward.
    return group._fsdp_compile_asked and is_gathered(group)


def reshard(group: TorchGroup) -> None:
    """Registers the sharded parameters of a group again, frozen or trained as the gathered ones, and frees these."""
    end_unshard(group)
    group._to_sharded()


def free_after_backward(states: Sequence[FSDPState]) -> None:
    """Frees what is gathered of states that are in no forward, but for groups that are to stay so after a backward."""
    idle = TrainingState.IDLE
    for state in states:
        for group in groups_of(state) if state._training_state is idle else ():
            # `is_gathered`, without its call: each backward asks.
            if group.reshard_after_backward and (group._all_gather_result is not None or not group.is_sharded):
                reshard(group)


def take_gathered(group: TorchGroup) -> dict[int, torch.Tensor]:
    """Takes the gathered parameters of a group, by `id` of their objects, from FSDP2, which registers the sharded ones.

    None of an all-gather extension, whose result is the extension's own. Copies of those that a forward of FSDP2's
    hooks has read: its backward makes gradients of these very objects.
    """
    end_unshard(group)
    taken = {}
    for param in group.fsdp_params:
        if not param._unsharded_inner_tensors:
            whole = param._unsharded_param.detach()
            local = whole._local_tensor if isinstance(whole, DTensor) else whole
            is_read = is_saved_by_autograd(param._unsharded_param)
            taken[id(param)] = local.clone() if is_read else local
            if not is_read:
                forget_gathered(param)
    group._to_sharded()
    return taken


def is_registered_by_torch(param: TorchParam, value: object) -> bool:
    """Whether FSDP2 itself registers this value for a parameter: sharded, gathered, or the part kept for backward."""
    own = (
        param.sharded_param,
        getattr(param, "_unsharded_param", None),
        getattr(param, "_sharded_post_forward_param", None),
    )
    return value is not None and any(value is each for each in own)


def follow_dtypes(group: TorchGroup) -> None:
    """Makes FSDP2 gather and reduce the parameters of a group in dtypes that fit those which they have now."""
    for param in group.fsdp_params:
        forget_gathered(param)
    group._init_mp_dtypes()


def forget_gathered(param: TorchParam) -> None:
    """Makes FSDP2 use new memory for a parameter when it next gathers it."""
    param.all_gather_outputs = []
    if hasattr(param, "_unsharded_param"):
        del param._unsharded_param


def divide_factor(group: TorchGroup) -> float | None:
    """What collectives' sums of gradients are divided by; `None` where collectives average over all ranks."""
    if group.gradient_divide_factor is None and group.force_sum_reduction_for_comms:
        where = placement_of(group)
        return float(where.shards.size * where.replicas.size)
    return group.gradient_divide_factor


def reduces_unused(group: TorchGroup) -> bool:
    """Whether parameters without a gradient get one of zeros (`set_reduce_scatter_unused_params`)."""
    return bool(getattr(group, "reduce_scatter_unused_params", False))


def has_extensions(group: TorchGroup) -> bool:
    """Whether some shard is of a class that says how it is gathered (`fsdp_pre_all_gather`)."""
    return any(hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather") for param in group.fsdp_params)


def only_for_hooks(group: TorchGroup) -> str:
    """What a user has set on a group that FSDP2's hooks can do alone; empty if nothing."""
    kinds = {type(group._all_gather_comm), type(group._reduce_scatter_comm)} - {DefaultAllGather, DefaultReduceScatter}
    if kinds:
        names = sorted(kind.__name__ for kind in kinds)
        return f"{', '.join(names)} for communication (set_custom_all_gather() or the like)"
    if group._all_reduce_hook is not None:
        return "set_all_reduce_hook()"
    if getattr(group, "reduce_scatter_max_input_buffers", 1) != 1:  # since torch 2.13
        return "set_reduce_scatter_max_input_buffers()"
    if any(getattr(param, "keep_unsharded_storage", False) for param in group.fsdp_params):  # since torch 2.15
        return "set_keep_unsharded_storage()"
    return "" if group.reshard_after_backward else "set_reshard_after_backward(False)"


def note_unreduced(group: TorchGroup) -> None:
    """Makes `finalize_backward()`, where the user calls it (torch 2.15), call the post-backward of a group."""
    group._post_backward_pending = True


def all_reduces(group: TorchGroup) -> bool:
    """Whether backwards sum gradients over replicas (`set_requires_all_reduce`); True without replicas."""
    return bool(group.all_reduce_grads) or not group._is_hsdp


def has_partial_gradients(group: TorchGroup) -> bool:
    """Whether gradients of FSDP2's wait for their sum over replicas."""
    return group._partial_reduce_output is not None


def set_reductions(group: TorchGroup, flags: tuple[bool, bool]) -> None:
    """Sets `reductions`, as `set_requires_gradient_sync` and `set_requires_all_reduce` do."""
    group.reduce_grads, group.all_reduce_grads = flags


def offloads(group: TorchGroup) -> bool:
    """Whether shards and gradients of a group stay on the host."""
    return any(param.offload_to_cpu for param in group.fsdp_params)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Ranks that share parameters out, or that have copies of what they share out; by default this one alone."""

    size: int = 1
    group: dist.ProcessGroup | None = None
    stride: int = 1
    """Distance of neighbours in the world."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The ranks over which a group is sharded.

    Attributes:
        shards: The shard group; without a process group if parameters are replicated only.
        replicas: The ranks with the same shards.
        post_forward: Neighbours that keep a part of each parameter for backward.
        reshards: Whether parameters are freed between forward and backward.
        reduces_apart: Whether gradients are reduced in a group of their own (`set_separate_reduce_scatter_group`).
    """

    shards: Ranks
    replicas: Ranks
    post_forward: Ranks
    reshards: bool
    reduces_apart: bool


def placement_of(group: TorchGroup) -> Placement:
    """The ranks over which a group is sharded, as FSDP2 has them now."""
    info, after = group.mesh_info, group.post_forward_mesh_info
    shards = replicas = post_forward = Ranks()
    if hasattr(info, "shard_mesh_size"):
        shards = Ranks(info.shard_mesh_size, info.shard_process_group, _stride(info.mesh, info.shard_mesh_dim))
        if after is not None and after.shard_mesh_size < info.shard_mesh_size:
            post_forward = Ranks(after.shard_mesh_size, after.shard_process_group)
    if getattr(info, "replicate_mesh_size", 1) > 1:
        stride = _stride(info.mesh, info.replicate_mesh_dim)
        replicas = Ranks(info.replicate_mesh_size, info.replicate_process_group, stride)
    reduces_apart = getattr(info, "reduce_scatter_process_group", None) is not None
    return Placement(shards, replicas, post_forward, after is not None, reduces_apart)


def _stride(mesh: DeviceMesh, dim: int | None) -> int:
    ranks = mesh.mesh
    dim = 0 if dim is None else dim
    return int(ranks.diff(dim=dim).abs().max()) if ranks.size(dim) > 1 else 1
