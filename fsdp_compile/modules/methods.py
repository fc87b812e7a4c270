"""The methods of a module that `fully_shard` was called on: FSDP2's, with its names and meanings."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import deprecated

from fsdp_compile._torch.autograd import backward_in_progress
from fsdp_compile.comm.mesh import with_reshard
from fsdp_compile.errors import ConfigError
from fsdp_compile.modules.classes import original_class, rebuild_specs
from fsdp_compile.modules.refused_methods import RefusedMethods, flag
from fsdp_compile.runtime import accumulation, gradients, post_backward, update_in_backward
from fsdp_compile.runtime.group_state import ReduceGroup
from fsdp_compile.runtime.module_state import is_sharded, state_of, units_of_call
from fsdp_compile.runtime.reduce_group import set_reduce_group
from fsdp_compile.runtime.units import FSDPUnit
from fsdp_compile.runtime.unshard import UnshardHandle, reshard, unshard


def set_division(units: Iterable[FSDPUnit], **settings: float | bool | None) -> None:
    """Sets `divide` or `sum_only` of `CommSettings`; raises `ConfigError` if a communication hook divides."""
    for unit in units:
        if unit.hook is not None:
            raise ConfigError(
                "the model has a communication hook, which divides by itself",
                where=f"{', '.join(settings)} of unit {unit.title}",
                instead="divide in the hook",
            )
        changed = dataclasses.replace(unit.comm_settings, **settings)  # type: ignore[arg-type]
        if changed != unit.comm_settings:
            unit.comm_settings = changed
            rebuild_specs(unit)


class ShardedModule(RefusedMethods, FSDPModule):
    """Methods of a module that `fully_shard` was called on, which is an `FSDPModule`.

    Flags stay until they are changed; what a backward does with its gradients is decided when its forward runs. Each
    combination that a step uses is compiled once.
    """

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:  # noqa: FBT001
        """Sets whether gradients are reduced, or accumulated unsharded as in `no_sync`."""
        chosen = flag(requires_gradient_sync, "set_requires_gradient_sync")
        accumulation.switch(_units(self, recurse=recurse), reduce_gradients=chosen, all_reduce=chosen)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:  # noqa: FBT001
        """Sets whether gradients are summed over replicas; if not, each replica accumulates its shards."""
        chosen = flag(requires_all_reduce, "set_requires_all_reduce")
        accumulation.switch(_units(self, recurse=recurse), all_reduce=chosen)

    def set_is_last_backward(self, is_last_backward: bool) -> None:  # noqa: FBT001
        """Sets whether the next backward ends the step, for the whole model.

        If not, its reduced gradients are accumulated in the units' flat gradients: parameters get neither `.grad` nor
        calls of their hooks, and pending gradients are not reduced, until a last backward.
        """
        chosen = flag(is_last_backward, "set_is_last_backward")
        for model in dict.fromkeys(unit.model for unit in _units(self, recurse=True)):
            accumulation.switch(model.units, last_backward=chosen)
            model.announced_backwards += not chosen

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:  # noqa: FBT001
        """Sets whether parameters are resharded after backward, or stay unsharded for the next microbatch.

        Those that stay are gathered at the start of the first forward after they were written to, all at once; outdated
        values are never used.
        """
        chosen = flag(reshard_after_backward, "set_reshard_after_backward")
        accumulation.switch(_units(self, recurse=recurse), reshard_after_backward=chosen)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:  # noqa: FBT001, FBT002
        """Sets whether parameters are resharded after forward and gathered again in backward.

        It also replaces a number of ranks that `fully_shard(reshard_after_forward=...)` got.
        """
        chosen = flag(reshard_after_forward, "set_reshard_after_forward")
        for unit in _units(self, recurse=recurse):
            placement = with_reshard(unit.policy.mesh_placement, reshard_after_forward=chosen)
            if placement != unit.policy.mesh_placement:
                unit.policy = dataclasses.replace(unit.policy, mesh_placement=placement)
                rebuild_specs(unit)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:  # noqa: FBT001, FBT002
        """Sets whether gradients are reduced on a process group of their own, concurrently with all-gathers.

        All ranks call it together: the group is made at the first call for a mesh.
        """
        queue = ReduceGroup.OWN if flag(enable, "set_separate_reduce_scatter_group") else ReduceGroup.SHARED
        for unit in set_reduce_group(_units(self, recurse=recurse), queue):
            rebuild_specs(unit)

    def set_modules_to_forward_prefetch(self, modules: Sequence[object]) -> None:
        """Sets the modules whose all-gathers run while this module's forward computes.

        They start in the order of the list, however other all-gathers are scheduled. An empty list sets nothing.

        Args:
            modules: Modules that `fully_shard` was called on, or made a unit of; all run after this one.

        Raises:
            ConfigError: If one of them is no such module, or this one has no parameters of its own.
        """
        _set_prefetch(self, modules, "forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[object]) -> None:
        """The same for backward, in which modules run in the opposite order."""
        _set_prefetch(self, modules, "backward_prefetch")

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sets what the sum of gradients over all ranks is divided by, for this call's units alone."""
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not is_number or not math.isfinite(factor) or factor <= 0:
            raise ConfigError(
                f"factor is {factor!r}", where="set_gradient_divide_factor()", instead="a positive number"
            )
        set_division(_units(self, recurse=False), divide=float(factor))

    @deprecated("use set_gradient_divide_factor()")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:  # noqa: FBT001
        """Sets whether collectives only sum, and the division is a step of its own, for this call's units alone."""
        set_division(_units(self, recurse=False), sum_only=flag(enable, "set_force_sum_reduction_for_comms"))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:  # noqa: FBT001
        """Takes FSDP2's flag, which changes nothing: backward gathers those parameters alone that it reads."""
        flag(unshard_in_backward, "set_unshard_in_backward")

    def _set_unshard_async_op(self, async_op: bool) -> None:  # noqa: FBT001
        """Takes FSDP2's flag, which changes nothing: memory of all-gathers is that of the stream which computes."""
        flag(async_op, "_set_unshard_async_op")

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Makes the next all-gathers of the model wait for an event, once.

        For an optimizer that runs on another stream: all-gathers wait for the current stream by themselves.
        """
        if not hasattr(event, "wait"):
            raise ConfigError(f"{event!r} is no event", where="set_post_optim_event()", instead="a torch.Event")
        for model in dict.fromkeys(unit.model for unit in _units(self, recurse=True)):
            model.post_optim_event = event

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # noqa: FBT001, FBT002
        """Gathers this call's units; they stay unsharded until the end of the next backward or `reshard()`.

        Args:
            async_op: Returns a handle at once; the next forward waits by itself if `handle.wait()` was not called.
        """
        own = list(_units(self, recurse=False))
        handle = unshard(own)
        if backward_in_progress() != -1:  # it may be the last: only its own end can free them
            for unit in own:
                for group in unit.param_groups:
                    post_backward.queue_post_backward(group)
        if flag(async_op, "unshard"):
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees the unsharded parameters of this call's units."""
        reshard(_units(self, recurse=False))

    def no_sync(self) -> AbstractContextManager[None]:
        """`fsdp_compile.no_sync` of this module, under the name by which frameworks look for it on a model."""
        assert isinstance(self, nn.Module)
        return accumulation.no_sync(self)

    @property
    def require_backward_grad_sync(self) -> bool:
        """DDP's flag, which scripts set for each microbatch: assigned, it is `set_requires_gradient_sync()`."""
        return all(unit.comm_settings.reduce_gradients for unit in _units(self, recurse=True))

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.set_requires_gradient_sync(flag(value, accumulation.DDP_FLAG))

    def reset_iter_state(self) -> None:
        """Drops the whole model's pending gradients and unsharded parameters: after an exception, say."""
        own = list(_units(self, recurse=True))
        for unit in own:
            for group in (*unit.replaced_groups, *unit.param_groups):
                gradients.drop(group)
                update_in_backward.reset(group)
            rebuild_specs(unit)
        reshard(own)

    def _get_fsdp_state(self) -> Any:
        """What torch's own functions for `FSDPModule`s ask for; the rest of torch's state does not exist here."""
        assert isinstance(self, nn.Module)
        state = state_of(self)
        assert state is not None
        return state.for_torch

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # As the class of the user's does it, and not FSDP2's: the next forward notices what has changed.
        return super(FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]


def _set_prefetch(self: object, modules: Sequence[object], field: str) -> None:
    assert isinstance(self, nn.Module)
    where = f"set_modules_to_{field}()"
    own = next((unit for unit in _units(self, recurse=False) if unit.has_root(self)), None)
    if not isinstance(modules, list | tuple):
        raise ConfigError(f"{modules!r} is no list", where=where, instead="a list of sharded modules")
    if own is None or not own.param_groups:
        raise ConfigError(
            f"{original_class(self).__name__} has no parameters of its own, so that nothing of it is gathered",
            where=where,
            instead="call it on the module whose gather the others follow",
        )
    named = [unit for module in modules for unit in _unit_of(module, self, where)]
    setattr(own, field, tuple(weakref.ref(unit) for unit in dict.fromkeys(named)))
    rebuild_specs(own)


def _unit_of(module: object, owner: nn.Module, where: str) -> list[FSDPUnit]:
    """The unit of a module; none if all of its parameters are in units of modules below it."""
    if module is owner:
        raise ConfigError("a module cannot prefetch itself", where=where, instead="modules that run after it")
    of_call = isinstance(module, nn.Module) and is_sharded(module)
    model = next(iter(_units(owner, recurse=True))).model
    among = units_of_call(module) if of_call else model.units  # type: ignore[arg-type]
    found = [unit for unit in among if unit.has_root(module) and unit.param_groups]  # type: ignore[arg-type]
    if not found and not of_call:
        raise ConfigError(
            f"{type(module).__name__} is no module of this model that fully_shard() was called on",
            where=where,
            instead="modules that are roots of units: fsdp_compile.units(model) lists them",
        )
    return found


def _units(module: object, *, recurse: bool) -> Iterator[FSDPUnit]:
    assert isinstance(module, nn.Module)
    parts = module.modules() if recurse else (module,)
    yield from dict.fromkeys(unit for part in parts for unit in units_of_call(part))
