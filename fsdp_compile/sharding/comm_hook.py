"""`register_comm_hook`: a user's function reduces the gradients of every unit of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from fsdp_compile.errors import ConfigError
from fsdp_compile.modules.classes import original_class
from fsdp_compile.ops import comm_hook
from fsdp_compile.ops.comm_hook import CommHook
from fsdp_compile.runtime import module_state
from fsdp_compile.sharding import allocate, views

if TYPE_CHECKING:
    from fsdp_compile.runtime.units import FSDPUnit


def register_comm_hook(model: nn.Module, hook: CommHook, state: object = None) -> None:
    """Reduces all gradients of a sharded model by a function of the user's.

    Call it once, before the first step. `bf16_compress_hook`, `fp16_compress_hook`, `reduce_scatter_hook` and
    `allreduce_hook` of `torch.distributed.algorithms._comm_hooks.default_hooks` become ordinary nodes of the graph
    (cast, reduce-scatter, cast), if their state averages over the same ranks or is `None`. Any other hook is one opaque
    node, and nothing overlaps with it. For hybrid sharding it replaces the reduction over the shard group, and its
    result is averaged over the replicas.

    Args:
        model: The outermost sharded module, or what `torch.compile` made of it.
        hook: `hook(state, gradient, output)` where parameters are sharded: `gradient` is `[size * n]`, in the reduce
            dtype, rank after rank, and `output`, `[n]`, is to be filled with this rank's part of the average.
            `hook(state, gradient)` where they are not: it works in place.
        state: First argument of the hook.

    Raises:
        ConfigError: If the hook cannot be called so, the model is not sharded or only a part of one, or has a hook.
    """
    model = getattr(model, "_orig_mod", model)
    units = module_state.units(model)
    _refuse(model, units)
    for unit in units:
        split = unit.policy.size > 1
        comm_hook.check_signature(hook, ("state", "gradient", "output") if split else ("state", "gradient"))
    _refuse_division(units)
    is_known = all(_is_known(unit, hook, state) for unit in units)
    registered = comm_hook.Registered("", hook, state) if is_known else comm_hook.register(hook, state)
    for unit in units:
        unit.hook = registered
        if registered.key or registered.compresses_to is not None:
            allocate.allocate_flat_params(unit, views.members(unit))


def _refuse(model: nn.Module, units: list[FSDPUnit]) -> None:
    where = f"register_comm_hook({original_class(model).__name__})"
    if module_state.is_inside(model) or (not units and any(module_state.reads_of(m) for m in model.modules())):
        raise ConfigError(
            "the module is a part of a sharded model", where=where, instead="the outermost module: one hook for all"
        )
    if not units:
        raise ConfigError("the model is not sharded", where=where, instead="call fully_shard(model) before")
    if any(unit.hook is not None for unit in units):
        raise ConfigError("the model has a communication hook already", where=where, instead="register one hook, once")


def _refuse_division(units: list[FSDPUnit]) -> None:
    for unit in units:
        if unit.comm_settings.divide is not None or unit.comm_settings.sum_only:
            raise ConfigError(
                "a divide factor is set, and a communication hook divides by itself",
                where=f"register_comm_hook(), unit {unit.title}",
                instead="divide in the hook",
            )


def _is_known(unit: FSDPUnit, hook: CommHook, state: object) -> bool:
    """Whether the passes can write the hook as nodes."""
    where = unit.policy.mesh_placement
    dim = where.shard_dim if where.size > 1 else where.replicate_dim
    ranks = [dist.get_rank()] if dim is None else dist.get_process_group_ranks(where.mesh.get_group(dim))
    return all(
        comm_hook.is_plain_average(hook, state, ranks, group.flat_param.dtype, split=where.size > 1)
        for group in unit.param_groups
        if group.flat_param.requires_grad
    )
