"""`fully_shard`: read the arguments, plan, allocate, install, initialize."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, ShardingStrategy

from fsdp_compile.comm.failures import tell_of_uncaught_errors
from fsdp_compile.comm.mesh import MeshPlacement
from fsdp_compile.config.policy import AnyOffloadPolicy, AnyPrecisionPolicy, WrapPolicy
from fsdp_compile.modules.attributes import follow_replaced
from fsdp_compile.modules.buffers import restored_buffers
from fsdp_compile.modules.classes import gather_on_read, give_methods, rebuild_specs
from fsdp_compile.modules.methods import ShardedModule
from fsdp_compile.modules.stored_shards import explain_backwards
from fsdp_compile.modules.torch_state import show_to_torch, torch_state
from fsdp_compile.runtime import (
    accumulation,
    chosen_gradients,
    kernels,  # noqa: F401  registers the kernels of operators
    loaded_state,
    post_backward,
)
from fsdp_compile.runtime.group_state import WrapSource
from fsdp_compile.runtime.module_refs import IgnoredParams
from fsdp_compile.runtime.module_state import (
    Nesting,
    ShardingCall,
    call_on,
    ensure_state,
    reads_of,
    state_of,
    units,
)
from fsdp_compile.runtime.optimizer_steps import count_optimizer_steps
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup, FSDPUnit, ModelState
from fsdp_compile.runtime.unshard_args import refresh_unshard_args
from fsdp_compile.sharding import adopt, checks, devices
from fsdp_compile.sharding.allocate import ParamToShard, allocate_flat_params
from fsdp_compile.sharding.arguments import Arguments, InitFn, UnitChoices, whole
from fsdp_compile.sharding.build import ShardingPlan, plan_units
from fsdp_compile.sharding.fsdp1_methods import refuse_fsdp1_methods
from fsdp_compile.sharding.materialize import fill_in
from fsdp_compile.sharding.mixed_precision import any_full_precision, cast_at
from fsdp_compile.sharding.shard_placement import PlacementFn
from fsdp_compile.sharding.views import pre_forward

tell_of_uncaught_errors()
M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])


def fully_shard(  # noqa: PLR0913  FSDP's arguments
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | Literal["auto"] | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: AnyPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
    offload_policy: AnyOffloadPolicy = OffloadPolicy(),  # noqa: B008  frozen
    ignored_params: Iterable[nn.Parameter | nn.Module] | None = None,
    auto_wrap_policy: WrapPolicy | None = None,
    param_init_fn: InitFn | None = None,
    sharding_strategy: ShardingStrategy | None = None,
    sync_module_states: bool = False,
    device_id: devices.Device | None = None,
    separate_reduce_group: bool = False,
    dp_mesh_dims: object = None,
) -> M:
    """Shards the parameters of `module` over the ranks of `mesh`, in place.

    Called on a whole model alone, it splits it into units: repeated blocks, then embedding and head apart, then the
    rest. Called bottom-up, as with FSDP2, each call makes one unit of what the calls below it left.

    What torch's `fully_shard` has sharded is taken over: its units, parameters and settings stay. On a module that
    torch's was called on, there is nothing else to do, and other arguments are refused.

    Args:
        module: The module. Its parameters become DTensors, views of one flat buffer per unit and dtype; those that are
            DTensors already, over other dimensions of the mesh, on the mesh of both. A list of modules becomes one
            unit, as with FSDP2.
        mesh: 1-D to shard over, 2-D (replicate, shard) for hybrid sharding, whatever the dimensions are called. By
            default the whole world; hybrid strategies name its dimensions "dp_replicate" and "fsdp".
        reshard_after_forward: True frees gathered parameters after forward and gathers them again in backward, False
            keeps them, a divisor k of the shard group keeps 1/k on each rank, and backward gathers over k neighbours
            alone. "auto" keeps as many of the last ones as fit into the planned memory. By default True.
        shard_placement_fn: Names another dimension than 0 to shard a parameter on, which must divide evenly; torch's
            `ShardPlacementResult` also names another mesh. Parameters on other meshes are units of their own.
        mp_policy: Dtypes of gathered parameters, reduction, inputs and outputs: FSDP2's `MixedPrecisionPolicy`, FSDP1's
            `MixedPrecision`, or ours, which has more options.
        offload_policy: `CPUOffloadPolicy()`, or FSDP1's `CPUOffload(True)`, keeps shards, gradients and optimizer state
            on the host; parameters are copied to the mesh's device for the all-gather, gradients back after the
            reduction.
        ignored_params: Parameters that are neither sharded nor reduced. A module stands for all parameters in it.
            Parameters that are sharded already are refused, and those of other modules left alone.
        auto_wrap_policy: One of FSDP1's wrap policies, to choose the units instead of the automatic split. A
            `CustomPolicy` may return a dict for a module: `sharding_strategy`, `reshard_after_forward`, `mesh` or
            `mp_policy` of that unit.
        sharding_strategy: FSDP1's name for a mesh and `reshard_after_forward`, instead of the latter. Hybrid sharding
            without a mesh shards over the ranks of each machine.
        param_init_fn: Initializes what is on the meta device in `module`, as `materialize` does. Without it, that
            stays on meta.
        sync_module_states: Broadcasts the values of the first rank of the mesh: each rank gets its part of sharded
            parameters, and all buffers. Other ranks may have them on meta. What the first rank has on meta, too, is
            left to `param_init_fn`, whose values on the first rank count.
        device_id: Where shards and buffers go that are on the CPU now: a device of the mesh's type, or the index of
            one. Only this rank's part of a parameter is moved.
        separate_reduce_group: As `set_separate_reduce_scatter_group()`.
        dp_mesh_dims: Torch's `DataParallelMeshDims`: which dimensions of `mesh`, over all of which the parameters are
            DTensors already, are to be sharded over, and which are replicas. Several are flattened into one.

    Returns:
        `module` itself.

    Raises:
        ConfigError: If a module is sharded already, the mesh has not 1 or 2 dimensions (or not those that
            `dp_mesh_dims` names), a policy is not supported,
            arguments contradict each other, a device does not exist, parameters are on another one or on the CPU with a
            mesh of GPUs (and not offloaded), a parameter has a gradient already, or is a DTensor over a mesh that has
            no dimensions beside those of `mesh`.
        RankMismatchError: With `sync_module_states`, if ranks have different models.
        UnsupportedModelError: If a parameter that is not ignored is of a subclass of tensors, a DTensor that cannot be
            divided further, or shares memory with another parameter or a buffer.
    """
    given = dict(locals())
    roots = checks.roots_of(module)
    is_taken_over = all(map(adopt.is_wrapped, roots))
    if is_taken_over:
        adopt.refuse_arguments(fully_shard, given)
    adopt_wrapped(whole(roots))
    if is_taken_over:
        return module
    arguments = Arguments.read(
        module,
        UnitChoices(sharding_strategy, mesh, reshard_after_forward, mp_policy, offload_policy, dp_mesh_dims),
        ignored_params=ignored_params,
        device_id=device_id,
        shard_placement_fn=shard_placement_fn,
        auto_wrap_policy=auto_wrap_policy,
        param_init_fn=param_init_fn,
        sync_module_states=sync_module_states,
        separate_reduce_group=separate_reduce_group,
    )
    _shard(arguments)
    return module


fully_shard.state = torch_state  # type: ignore[attr-defined]  # as FSDP2's function has it


def adopt_wrapped(root: nn.Module, starting: nn.Module | None = None) -> bool:
    """Shards what torch's `fully_shard` has sharded in `root`, in the same units; returns whether there was any.

    Args:
        root: A model.
        starting: As for `adopt.plan`.

    Raises:
        ConfigError: As `adopt.plan`; nothing is changed then.
        UnsupportedModelError: The same.
    """
    calls = adopt.plan(root, starting)
    adopt.remove(calls)
    for call in calls:
        _shard(call.arguments())
    for call in calls:
        call.set_up()
    return bool(calls)


def _shard(arguments: Arguments) -> None:
    root = whole(arguments.modules)
    plan = plan_units(root, arguments)
    made = _allocate(root, plan, arguments)
    _install(root, made, plan, arguments)
    _initialize(root, made, plan, arguments)
    model = ensure_state(root).model
    assert model is not None
    for initial in plan.initial:
        initial.note(made, model)


def _allocate(module: nn.Module, plan: ShardingPlan, arguments: Arguments) -> list[FSDPUnit]:
    """Makes the units: their flat parameters, and DTensors in the place of plain parameters."""
    model = ModelState(pre_forward)
    model.ignored = IgnoredParams(module, plan.ignored)
    ensure_state(module).model = model
    plan.precision.apply()
    for descendant in plan.below:
        _undo_split(descendant, model)
    names = {id(m): name for name, m in module.named_modules()}
    earlier = units(module)
    for unit in earlier:
        unit.rename(names)
    model.adopt(earlier)
    for unit in earlier:
        if unit.forward_prefetch or unit.backward_prefetch:
            rebuild_specs(unit)  # it names other units
    if plan.tied:
        # Also of other models, with which this one shares a part.
        groups = [*FSDPParamGroup.alive(), *(group for unit in earlier for group in unit.param_groups)]
        params = {id(param.parameter): param for group in groups for param in group.params}
        for parameter, owner, attribute in plan.tied:
            _tie(params[id(parameter)], owner, attribute)
    made = []
    for planned in plan.units:
        first, *others = arguments.modules if planned.root is module else (planned.root,)
        unit = FSDPUnit(weakref.ref(first), planned.name, planned.policy, plan.wrap_source, weakref.ref(model))
        unit.other_roots = tuple(weakref.ref(other) for other in others)
        if others:
            unit.rename(names)
        unit.number_in_call = planned.number
        unit.reduce_group = arguments.reduce_group
        allocate_flat_params(unit, planned.params)
        made.append(unit)
    return made


def _install(module: nn.Module, made: list[FSDPUnit], plan: ShardingPlan, arguments: Arguments) -> None:
    """Gives modules their state, classes, casts and methods."""
    model = ensure_state(module).model
    assert model is not None
    for each in arguments.modules:
        ensure_state(each).call = ShardingCall(made, model.ignored, arguments.unit.precision)
    # Again: now with the units that this call made, in the order of registration among the earlier ones.
    model.adopt(units(module))
    for each in arguments.modules:
        _enter_forwards(each)
        give_methods(each, ShardedModule)
        show_to_torch(each)
        accumulation.follow_no_sync(each, made)
    for descendant in plan.below:
        call = call_on(descendant)
        assert call is not None
        call.nesting = Nesting.INSIDE
        cast_at(descendant, call.precision, Nesting.INSIDE)
    for root, own in plan.roots.items() if plan.wrap_source is WrapSource.CALL else ():
        output = own.mixed_precision.output_dtype if root in plan.different else None
        cast_at(root, dataclasses.replace(own.mixed_precision, output_dtype=output), Nesting.INSIDE)
    for each in arguments.modules:
        cast_at(each, arguments.unit.precision, Nesting.OUTERMOST)
    for part in module.modules():
        part_state = state_of(part)
        if part_state is not None:
            part_state.model = model
    for param in (param for unit in model.units for param in unit.params):
        follow_replaced(param.parameter)
    loaded_state.follow_optimizers()
    chosen_gradients.follow_backwards()
    post_backward.follow_backwards()
    explain_backwards()
    refuse_fsdp1_methods()
    count_optimizer_steps()


def _initialize(module: nn.Module, made: list[FSDPUnit], plan: ShardingPlan, arguments: Arguments) -> None:
    """Moves buffers, and gives parameters and buffers the values that the call asks for."""
    device = arguments.device
    with restored_buffers(module):
        if device is not None:
            devices.move_buffers(module, device, [*plan.below, *arguments.ignored.modules])
        for first_rank in plan.first_rank:
            first_rank.send(module, made, device)
        if arguments.init_fn is not None:
            earlier = [call.initialized for part in plan.below if (call := call_on(part)) is not None]
            together = {part: attributes for each in earlier for part, attributes in each.items()}
            made_now = fill_in(module, device, arguments.init_fn, arguments.init_from, together)
            own = call_on(arguments.modules[0])
            assert own is not None
            own.initialized.update(made_now)


def _undo_split(root: nn.Module, model: ModelState) -> None:
    """Makes one unit for each mesh of an automatic split."""
    call = call_on(root)
    assert call is not None
    # The call was not alone, as the split assumed, but the first of a bottom-up series.
    modules = set(root.modules())
    parts = [unit for unit in call.units if unit.root_ref() in modules]  # others were cut off since, and stay apart
    if len(parts) < 2 or any(part.wrap_source is not WrapSource.SPLIT for part in parts):
        return
    alike: dict[MeshPlacement, list[FSDPUnit]] = {}
    for part in parts:
        alike.setdefault(part.policy.mesh_placement, []).append(part)
    joined = [_joined(root, held, number, model) for number, held in enumerate(alike.values(), start=1)]
    call.units = [*joined, *(unit for unit in call.units if unit not in parts)]


def _joined(root: nn.Module, parts: Sequence[FSDPUnit], number: int, model: ModelState) -> FSDPUnit:
    """One unit of the parameters of several."""
    first = parts[0]
    unit = FSDPUnit(
        weakref.ref(root),
        "",
        first.policy,
        WrapSource.CALL,
        weakref.ref(model),
        hook=first.hook,
        comm_settings=first.comm_settings,
        reduce_group=first.reduce_group,
        number_in_call=number,
    )
    names = {id(m): name for name, m in root.named_modules()}
    params = [
        ParamToShard(
            f"{names[id(part.root)]}.{param.name}".removeprefix("."),
            list(param.module_refs),
            param.parameter,
            param.spec.dim,
            param.spec.order,
            keeps_own_dtype=any_full_precision(owner for owner, _ in param.module_refs),
            tensor_parallel=param.tensor_parallel,
        )
        for part in parts
        for param in part.params
    ]
    allocate_flat_params(unit, params)
    return unit


def _tie(param: FSDPParam, module: nn.Module, attribute: str) -> None:
    """Registers a sharded parameter in one more module."""
    owner, owner_attribute = param.module_refs[0]
    module._parameters[attribute] = param.parameter
    param.module_refs.append(module, attribute)
    read = reads_of(owner)[owner_attribute]
    gather_on_read(module, {attribute: read}, param.eval_read(attribute))
    refresh_unshard_args(read.group)


def _enter_forwards(root: nn.Module) -> None:
    """Gives modules without sharded parameters, but with some below, a class of ours."""
    for module in root.modules():
        # Their code may read parameters of their children, which gathers only inside of a forward.
        if not reads_of(module) and any(reads_of(part) for part in module.modules()):
            gather_on_read(module)
