"""`register_comm_hook`: a user's function reduces the gradients of every unit of a model in compiled steps."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from fsdp_compile._torch import fully_shard as fsdp2
from fsdp_compile._torch import fully_shard_params as torch_params
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.shards import unwrap
from fsdp_compile.fsdp2.take_over import model_of
from fsdp_compile.ops import comm_hook
from fsdp_compile.ops.comm_hook import CommHook, Registered


def register_comm_hook(model: nn.Module, hook: CommHook, state: object = None) -> None:
    """Reduces all gradients of a sharded model by a function of the user's, in compiled steps.

    Forwards that are not compiled, and units that FSDP2's hooks gather in a compiled one, are plain FSDP2: their
    gradients are reduced without the hook. FSDP2's own `set_all_reduce_hook` is for these.

    `bf16_compress_hook`, `fp16_compress_hook`, `reduce_scatter_hook` and `allreduce_hook` of
    `torch.distributed.algorithms._comm_hooks.default_hooks` become ordinary nodes of the graph (cast, reduce-scatter,
    cast), if their state averages over the same ranks or is `None`. Any other hook is one opaque node, and nothing
    overlaps with it. For hybrid sharding it replaces the reduction over the shard group, and its result is averaged
    over the replicas.

    Args:
        model: The outermost sharded module, or what `torch.compile` made of it.
        hook: `hook(state, gradient, output)` where parameters are sharded: `gradient` is `[size * n]`, in the reduce
            dtype, rank after rank, and `output`, `[n]`, is to be filled with this rank's part of the average.
            `hook(state, gradient)` where they are not: it works in place.
        state: First argument of the hook.

    Raises:
        ConfigError: If the hook cannot be called so, the model is not sharded or only a part of one, or has a hook, or
            gradients are divided by what a user has set.
    """
    model = unwrap(model)
    states = fsdp2.states_below(model)
    groups = fsdp2.groups_below(model)
    _refuse(model, states, groups)
    for group in groups:
        is_split = fsdp2.placement_of(group).shards.size > 1
        comm_hook.check_signature(hook, ("state", "gradient", "output") if is_split else ("state", "gradient"))
    is_known = all(_is_known(group, hook, state) for group in groups)
    registered = Registered("", hook, state) if is_known else comm_hook.register(hook, state)
    for each in states:
        fsdp2.keep(each, "comm_hook", registered)
    known = model_of(model)
    for unit in [] if known is None else known.units:
        unit.refresh_specs()


def _refuse(model: nn.Module, states: list[fsdp2.FSDPState], groups: list[fsdp2.TorchGroup]) -> None:
    where = f"register_comm_hook({type(model).__name__})"
    if not states:
        raise ConfigError("the model is not sharded", where=where, instead="call fully_shard(model) before")
    if fsdp2.is_inner(states[0]):
        raise ConfigError(
            "the module is a part of a sharded model", where=where, instead="the outermost module: one hook for all"
        )
    if any(fsdp2.kept(each, "comm_hook") is not None for each in states):
        raise ConfigError("the model has a communication hook already", where=where, instead="register one hook, once")
    if any(fsdp2.divide_factor(group) is not None for group in groups):
        raise ConfigError(
            "a divide factor is set, and a communication hook has to divide on its own",
            where=where,
            instead="divide in it",
        )


def _is_known(group: fsdp2.TorchGroup, hook: CommHook, state: object) -> bool:
    """Whether the passes can write the hook as nodes."""
    where = fsdp2.placement_of(group)
    is_split = where.shards.size > 1
    over = (where.shards if is_split else where.replicas).group
    ranks = [dist.get_rank()] if over is None else dist.get_process_group_ranks(over)
    return all(
        comm_hook.is_plain_average(hook, state, ranks, parameter.dtype, split=is_split)
        for param in fsdp2.params_of(group)
        if (parameter := torch_params.sharded_param(param)).requires_grad
    )
