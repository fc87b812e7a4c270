"""`fully_shard`: which parameters go into which unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, ShardingStrategy

from fsdp_compile.config.policy import AnyOffloadPolicy as OffloadedBy
from fsdp_compile.config.policy import AnyPrecisionPolicy, WrapPolicy, as_mixed_precision, as_offload
from fsdp_compile.errors import ConfigError
from fsdp_compile.modules.classes import gather_on_read, give_methods, rebuild_specs
from fsdp_compile.modules.methods import ShardedModule
from fsdp_compile.runtime import accumulation, replaced_params
from fsdp_compile.runtime.group_state import ReduceGroup, WrapSource
from fsdp_compile.runtime.module_state import _STATE, Nesting, Sharding, is_sharded, units
from fsdp_compile.runtime.reduce_queue import set_reduce_group
from fsdp_compile.runtime.units import READS, FSDPUnit, UnitPolicy
from fsdp_compile.sharding import build, devices, sync_states, wrap
from fsdp_compile.sharding.allocate import PlacementFn
from fsdp_compile.sharding.arguments import Arguments, InitFrom
from fsdp_compile.sharding.build import make_units, merged_split
from fsdp_compile.sharding.checks import (
    ignored_in,
    refuse_gradients,
    refuse_part,
    refuse_reshard,
    refuse_root,
    refuse_wrappers,
)
from fsdp_compile.sharding.materialize import InitFn, check_init_fn, fill_in
from fsdp_compile.sharding.mixed_precision import cast_at, keep_full_precision


def introduce(module: nn.Module, every: Iterable[FSDPUnit], made: Iterable[FSDPUnit]) -> None:
    """Gives a module that was just sharded its methods.

    Args:
        module: The module.
        every: All units in it, of which it is the outermost module now.
        made: Those that are new.
    """
    of_model = tuple(every)
    for unit in of_model:
        unit.outermost, unit.of_model = module, of_model
    give_methods(module, ShardedModule)
    accumulation.follow_active(module, made)


def separate(units: Iterable[FSDPUnit]) -> None:
    """Makes units reduce gradients on a process group of their own."""
    for unit in set_reduce_group(units, ReduceGroup.OWN):
        rebuild_specs(unit)


M = TypeVar("M", bound=nn.Module)


def fully_shard(  # noqa: PLR0913  FSDP's arguments
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | Literal["auto"] | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: AnyPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
    offload_policy: OffloadedBy = OffloadPolicy(),  # noqa: B008  frozen
    ignored_params: Iterable[nn.Parameter | nn.Module] | None = None,
    auto_wrap_policy: WrapPolicy | None = None,
    param_init_fn: InitFn | None = None,
    sharding_strategy: ShardingStrategy | None = None,
    sync_module_states: bool = False,
    device_id: devices.Device | None = None,
    separate_reduce_group: bool = False,
) -> M:
    """Shards the parameters of `module` over the ranks of `mesh`, in place.

    Called on a whole model alone, it splits it into units: repeated blocks, then embedding and head apart, then the
    rest. Called bottom-up, as with FSDP2, each call makes one unit of what the calls below it left.

    Args:
        module: The module. Its parameters become DTensors, views of one flat buffer per unit and dtype.
        mesh: 1-D to shard over, 2-D (replicate, shard) for hybrid sharding. By default the whole world.
        reshard_after_forward: True frees gathered parameters after forward and gathers them again in backward, False
            keeps them, a divisor k of the shard group keeps 1/k on each rank, and backward gathers over k neighbours
            alone. "auto" keeps as many of the last ones as a planned schedule has room for. By default True.
        shard_placement_fn: Names another dimension than 0 to shard a parameter on; it must divide evenly.
        mp_policy: Dtypes of gathered parameters, reduction, inputs and outputs: FSDP2's `MixedPrecisionPolicy`, our
            `MixedPrecision`, which says more, or FSDP1's.
        offload_policy: `CPUOffloadPolicy()`, or FSDP1's `CPUOffload(True)`, keeps shards, gradients and optimizer state
            on the host; parameters are copied to the mesh's device for the gather, gradients back after the reduction.
        ignored_params: Parameters to leave as they are: neither sharded nor reduced. A module stands for all
            parameters in it.
        auto_wrap_policy: One of FSDP1's wrap policies, to choose the units instead of the automatic split. A
            `CustomPolicy` may return a dict for a module: `sharding_strategy`, `reshard_after_forward`, `mesh` or
            `mp_policy` of that unit.
        sharding_strategy: FSDP1's name for a mesh and what is kept for backward, instead of `reshard_after_forward`.
            Hybrid sharding without a mesh shards over the ranks of each machine.
        param_init_fn: Initializes what is on the meta device in `module`, as `materialize` does. Without it, that
            stays on meta.
        sync_module_states: Gives every rank the values that the first rank of the mesh has: its part of each parameter
            that is sharded, and all buffers. Other ranks may have them on meta. What the first rank has on meta, too,
            is left to `param_init_fn`, whose values on the first rank count.
        device_id: Where to keep shards and buffers that are on the CPU now: a device of the mesh's kind, or the index
            of one. A parameter moves part by part, so that the device never holds it in full.
        separate_reduce_group: Reduces gradients on a process group of their own, beside the one that gathers: what
            `set_separate_reduce_scatter_group()` does.

    Returns:
        `module` itself.

    Raises:
        ConfigError: If the module is sharded already, the mesh has not 1 or 2 dimensions, a policy is not supported,
            arguments contradict each other, a device does not exist, parameters are on another one or on
            the CPU beside a mesh of GPUs (and not offloaded), or a parameter has a gradient already.
        RankMismatchError: With `sync_module_states`, if ranks have different models.
        UnsupportedModelError: If a parameter that is not ignored is a DTensor already.
    """
    refuse_root(module)
    refuse_reshard(reshard_after_forward)
    offload = as_offload(offload_policy)
    source = InitFrom.of(sync_module_states)
    check_init_fn(param_init_fn)
    precision = as_mixed_precision(mp_policy)
    _refuse_module(module)
    listed = ignored_in(module, ignored_params)
    ignored = listed.ids
    refuse_gradients(module, ignored)
    kind = devices.kind_of(module, device_id, offload)
    arguments = Arguments(sharding_strategy, mesh, reshard_after_forward, precision, kind, offload)
    policy = arguments.policy()
    device = devices.chosen(policy.mesh, device_id)
    devices.refuse_misplaced(module, ignored, device, policy)
    below = [m for m in module.modules() if is_sharded(m)]
    _take_over(module, below)
    ignored |= {i for m in below for i in m.__dict__[_STATE].ignored}
    occurrences = list(build.unmanaged(module, units(module), ignored))
    managed = {p for _, _, _, p in occurrences}
    roots: dict[nn.Module, UnitPolicy] = {}
    origin = WrapSource.CALL
    if auto_wrap_policy is not None:
        chosen = wrap.policy_units(module, auto_wrap_policy, managed)
        roots = {root: arguments.overridden(overrides) for root, overrides in chosen.items()}
    elif not below:
        roots, origin = dict.fromkeys(wrap.automatic_units(module, managed), policy), WrapSource.SPLIT
    states = sync_states.look(module, build.each_once(occurrences), policy.mesh, source)
    different = {root: own for root, own in roots.items() if own.mixed_precision != precision}
    for root, own in different.items():
        keep_full_precision(root, own.mixed_precision, below)
    keep_full_precision(module, precision, [*below, *different])
    made = make_units(module, {**roots, module: policy}, origin, occurrences, shard_placement_fn, device)
    object.__setattr__(module, _STATE, Sharding(made, ignored, precision))
    introduce(module, units(module), made)
    if separate_reduce_group:
        separate(made)
    _enter_forwards(module)
    replaced_params.update_optimizers_at_their_next_step()
    if device is not None:
        devices.move_buffers(module, device, [*below, *listed.modules])
    states.send(module, made, device)
    for descendant in below:
        descendant.__dict__[_STATE].nesting = Nesting.INSIDE
        cast_at(descendant, descendant.__dict__[_STATE].precision, Nesting.INSIDE)
    for root, own in roots.items() if origin is WrapSource.CALL else ():
        output = own.mixed_precision.output_dtype if root in different else None
        cast_at(root, dataclasses.replace(own.mixed_precision, output_dtype=output), Nesting.INSIDE)
    cast_at(module, precision, Nesting.OUTERMOST)
    if param_init_fn is not None:
        fill_in(module, device, param_init_fn, source)
    return module


def _refuse_module(module: nn.Module) -> None:
    refuse_wrappers(module)
    if is_sharded(module):
        raise ConfigError(
            "this module is sharded already",
            where=f"fully_shard({type(module).__name__})",
            instead="call fully_shard() once per module, children before parents",
        )
    refuse_part(module, units(module))


def _take_over(module: nn.Module, below: list[nn.Module]) -> None:
    """Makes the units of earlier calls parts of a larger model."""
    for descendant in below:
        sharding: Sharding = descendant.__dict__[_STATE]
        sharding.units = merged_split(descendant, sharding.units)
    names = {id(m): name for name, m in module.named_modules()}
    for unit in units(module):
        unit.name = names[id(unit.root)]
    for unit in units(module):
        if unit.forward_prefetch or unit.backward_prefetch:
            rebuild_specs(unit)  # it names other units


def _enter_forwards(root: nn.Module) -> None:
    """Lets modules whose code may read parameters of their children know when they are inside their forward."""
    for module in root.modules():
        if READS not in module.__dict__ and any(READS in m.__dict__ for m in module.modules()):
            gather_on_read(module, {})
