"""Building a unit's parameter groups out of full parameters, or of shards in an earlier layout."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fsdp_compile._torch.autograd import is_saved_by_autograd, move_hooks, share_hooks
from fsdp_compile._torch.tensors import is_wrapper, local_tensor, new_dtensor, set_local_tensor
from fsdp_compile.comm.gather_extension import is_extended, shard_of
from fsdp_compile.comm.groups import GroupRole, alias_of, rank_store
from fsdp_compile.comm.tensor_parallel import TensorParallel
from fsdp_compile.config.policy import compute_device, host_buffer, refuse_device
from fsdp_compile.errors import ConfigError
from fsdp_compile.layout import flat_layout
from fsdp_compile.layout.flat_layout import local_part, local_shape
from fsdp_compile.layout.spec import UnshardSpec
from fsdp_compile.layout.wire_formats import ASKED, WireFormat
from fsdp_compile.modules.classes import gather_params, rebuild_specs
from fsdp_compile.runtime import post_backward, replaced_params, unshard, update_in_backward
from fsdp_compile.runtime.group_state import ComparedAs
from fsdp_compile.runtime.module_refs import ModuleRefs
from fsdp_compile.runtime.reduce_group import reduce_alias
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup, FSDPUnit, UnitPolicy
from fsdp_compile.runtime.unshard_args import refresh_unshard_args
from fsdp_compile.sharding import check_params, gather_extensions


@dataclasses.dataclass
class ParamToShard:
    """A parameter that is to be laid out in a unit.

    Attributes:
        name: Relative to the unit's root.
        module_refs: Every (module, attribute) that registers it.
        parameter: A full parameter, one that is split over `tensor_parallel` alone, or one that is sharded on `dim`.
        dim: The dimension to shard; `None` for a 0-d parameter.
        order: As in `UnshardSpec`, if the parameter is a DTensor, which does not tell.
        device: Where its shard goes, if not to where the parameter is.
        keeps_own_dtype: Whether a module that registers it is excluded from mixed precision.
        tensor_parallel: How it was laid out as a DTensor before it was sharded.
    """

    name: str
    module_refs: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    dim: int | None
    order: tuple[int, ...] = ()
    device: torch.device | None = None
    keeps_own_dtype: bool = False
    tensor_parallel: TensorParallel | None = None

    @property
    def shape(self) -> torch.Size:
        """Of what is divided over the shard group: the parameter, or this rank's part of one that is split already."""
        return self.parameter.shape if self.tensor_parallel is None else self.tensor_parallel.local_shape

    @property
    def is_extended(self) -> bool:
        """Whether its class says how it is gathered."""
        return is_extended(local_tensor(self.parameter) if isinstance(self.parameter, DTensor) else self.parameter)

    @property
    def target(self) -> torch.device:
        """The device of its shard."""
        if self.device is not None:
            return self.device
        is_sharded = isinstance(self.parameter, DTensor)
        return local_tensor(self.parameter).device if is_sharded else self.parameter.device  # type: ignore[arg-type]


def allocate_flat_params(unit: FSDPUnit, members: Sequence[ParamToShard]) -> None:
    """Lays `members` out in new parameter groups of `unit`, and makes their modules read from there.

    A parameter that is a DTensor already keeps its identity; a full one is replaced.
    """
    key = lambda m: (  # noqa: E731
        str(m.parameter.dtype), m.parameter.requires_grad, str(m.target), m.keeps_own_dtype, m.is_extended
    )  # fmt: skip
    _refuse_to_lose_gradients(unit)
    kinds = [list(alike) for _, alike in itertools.groupby(sorted(members, key=key), key)]
    order = {id(m): i for i, m in enumerate(members)}
    _keep_for_backward(unit)
    unit.param_groups = [_param_group(unit, sorted(alike, key=lambda m: order[id(m)])) for alike in kinds]
    _number(unit)
    gather_params(unit.param_groups)
    for flat in unit.param_groups:
        refresh_unshard_args(flat)
    follow_updaters(unit)


def _number(unit: FSDPUnit) -> None:
    """Numbers the parameter groups of a unit, so that ranks can compare what they gather."""
    # Units, and not groups, are counted: a rank may be the only one that makes groups anew.
    spec = unit.param_groups[0].params[0].spec
    shard, replicate = (rank_store(name) if name else None for name in (spec.group, spec.replicate_group))
    places = [place for place in (shard, replicate) if place is not None]
    # In each place by itself: units on other shard groups may have the same replicas.
    for place in places:
        if place not in unit.numbers:
            unit.numbers[place] = next(place.units)
    for position, flat in enumerate(unit.param_groups if places else ()):
        numbers = {place: unit.numbers[place] * _MOST_GROUPS + position for place in places}
        flat.compared = ComparedAs(shard, replicate, numbers)


_MOST_GROUPS = 2**16
"""More parameter groups than a unit has."""


def follow_updaters(unit: FSDPUnit) -> None:
    """Updates a unit's specs if its parameters, which may be others now, are to be updated at another time."""
    for flat in unit.param_groups:
        update_in_backward.note_late_grads(flat)
    if any(update_in_backward.wanted(flat) is not flat.params[0].spec.update for flat in unit.param_groups):
        rebuild_specs(unit)


def _refuse_to_lose_gradients(unit: FSDPUnit) -> None:
    if any(flat.has_pending_grads for flat in unit.param_groups):
        raise ConfigError(
            "parameters changed their dtype, device, shape or requires_grad while gradients of them wait for their "
            "reduction",
            where=unit.title,
            instead="change them after a backward pass outside of no_sync(), or drop the gradients with "
            "reset_iter_state()",
        )


def _keep_for_backward(unit: FSDPUnit) -> None:
    """Keeps the groups of a unit that is laid out anew while forwards that have read them wait for their backward."""
    # A critic that is frozen for the actor's loss and thawed again has both losses in one backward.
    for group in filter(_is_in_graph, unit.param_groups):
        unshard.free([group])
        group.is_replaced = True
        unit.replaced_groups.append(group)


def forget_replaced(unit: FSDPUnit) -> None:
    """Drops those replaced groups of a unit that no graph and no gradient waits for any more."""
    unit.replaced_groups = [g for g in unit.replaced_groups if _is_in_graph(g) or g.has_pending_grads]


def _is_in_graph(group: FSDPParamGroup) -> bool:
    leaves = (group.flat_param, *group.grads.accumulators.values())
    return group.flat_param.requires_grad and any(map(is_saved_by_autograd, leaves))


def _param_group(unit: FSDPUnit, members: list[ParamToShard]) -> FSDPParamGroup:
    first = members[0].parameter
    policy = unit.policy
    dtypes = _dtypes(unit, members[0])
    shapes = [flat_layout.ParameterShape(m.name, tuple(m.shape), m.dim) for m in members]
    planned = flat_layout.plan_layout(
        shapes,
        size=policy.size,
        stored=dtypes.stored,
        sent=dtypes.sent,
        reduced=dtypes.reduced,
        per_byte=dtypes.wire.per_byte if dtypes.wire else 0,
    )
    buffer = _buffer(unit, members, planned.numel, dtypes.stored)
    params = [_sharded(unit, members[place.index], place, buffer, dtypes) for place in planned.slots]
    flat = FSDPParamGroup(unit, nn.Parameter(buffer, requires_grad=first.requires_grad), params)
    post_backward.install_grad_hooks(flat)
    post_backward.install_grad_accumulators(flat)
    return flat


def _buffer(unit: FSDPUnit, members: Sequence[ParamToShard], numel: int, dtype: torch.dtype) -> torch.Tensor:
    device, offload = members[0].target, unit.policy.offload
    if members[0].is_extended:
        # Their values are tensors of their own: this is the leaf that gradients go to, for which stride 0 is enough.
        return torch.zeros(1, dtype=dtype, device=device).expand(numel)
    if offload is None or device.type == "meta" or not compute_device(offload, unit.policy.mesh.device_type):
        return torch.zeros(numel, dtype=dtype, device=device)
    for member in members:
        if _is_sharded(member.parameter, member.tensor_parallel):  # sharded before, and moved since
            refuse_device(member.name, member.target)
    return host_buffer(numel, dtype, offload)


@dataclasses.dataclass(frozen=True)
class _Dtypes:
    """Of one parameter group: as stored, as read, as reduced, and how large ones are sent if they are quantized.

    Attributes:
        accumulated: Of gradients that wait for their reduction, if not as reduced.
    """

    stored: torch.dtype
    sent: torch.dtype
    reduced: torch.dtype
    wire: WireFormat | None = None
    accumulated: torch.dtype | None = None


def _dtypes(unit: FSDPUnit, member: ParamToShard) -> _Dtypes:
    """Integer parameters, and those that mixed precision excludes, are sent and reduced as stored."""
    policy = unit.policy
    stored, asked = member.parameter.dtype, policy.mixed_precision
    if member.keeps_own_dtype:
        return _Dtypes(stored, stored, stored)
    sent = (asked.param_dtype or stored) if stored.is_floating_point else stored
    is_quantized = stored.is_floating_point and policy.size > 1 and not member.is_extended
    wire = ASKED[asked.gather_dtype] if is_quantized and asked.gather_dtype is not None else None
    reduced = asked.reduce_dtype or sent
    compressed = unit.hook.compresses_to if unit.hook is not None else None
    # What a hook compresses is the message; sums of microbatches in 16 bits would stop growing.
    if compressed is not None and compressed != reduced:
        return _Dtypes(stored, sent, compressed, wire, accumulated=reduced)
    return _Dtypes(stored, sent, reduced, wire)


def _sharded(
    unit: FSDPUnit, member: ParamToShard, place: flat_layout.Slot, buffer: torch.Tensor, dtypes: _Dtypes
) -> FSDPParam:
    policy, parameter = unit.policy, member.parameter
    shape = tuple(member.shape)
    is_large = flat_layout.is_large(shape, member.dim, policy.size, dtypes.stored)
    spec = UnshardSpec(
        offset=place.offset,
        extent=place.extent,
        shape=shape,
        dim=member.dim,
        size=policy.size,
        group=_alias(policy, policy.mesh_placement.shard_dim, "shard"),
        replicas=policy.mesh_placement.replicas,
        replicate_group=_alias(policy, policy.mesh_placement.replicate_dim, "replicate"),
        stride=policy.mesh_placement.stride(policy.mesh_placement.shard_dim),
        replicate_stride=policy.mesh_placement.stride(policy.mesh_placement.replicate_dim),
        param_dtype=dtypes.sent,
        reduce_dtype=dtypes.reduced,
        accumulate_dtype=dtypes.accumulated,
        hook=unit.hook.key if unit.hook is not None and parameter.requires_grad else "",
        gather_format=dtypes.wire.name if dtypes.wire and is_large else "",
        reshard=policy.mesh_placement.reshard,
        order=member.order or memory_order(parameter),
        divide=unit.divide,
        post_forward_size=policy.mesh_placement.post_forward_size,
        post_forward_group=policy.mesh_placement.post_forward_alias(),
        compute=compute_device(policy.offload, policy.mesh.device_type),
        reduce_group=reduce_alias(unit),
        forward_prefetch=unit.prefetched("forward_prefetch"),
        backward_prefetch=unit.prefetched("backward_prefetch"),
    )
    # Without padding: what the DTensor has as its local tensor.
    stored = local_shape(shape, member.dim, policy.size, policy.rank)
    view = buffer[place.offset : place.offset + torch.Size(stored).numel()].view(stored)
    refs = ModuleRefs(member.module_refs)
    param = FSDPParam(
        *(member.name, refs, parameter, spec, policy.rank, tuple(view.shape), view),
        position=place.index,
        tensor_parallel=member.tensor_parallel,
        extension=gather_extensions.extension_of(member.name, refs, parameter, member.dim, policy),
    )
    in_eval = dataclasses.replace(
        spec, param_dtype=dtypes.stored, reduce_dtype=dtypes.stored, accumulate_dtype=None, gather_format=""
    )
    if policy.mixed_precision.full_precision_in_eval and in_eval != spec:
        param.eval_spec = in_eval
    if policy.mixed_precision.keep_low_precision_grads and dtypes.sent is not dtypes.stored:
        param.grad_dtype = dtypes.sent
    bind(param, parameter, policy)
    return param


def _alias(policy: UnitPolicy, dim: int | None, role: GroupRole) -> str:
    """Name of the group along a dimension of the mesh; empty if there is none, or one rank alone."""
    if dim is None or (role == "replicate" and policy.mesh.size(dim) == 1):
        return ""
    return alias_of(policy.mesh.get_group(dim), role)


def memory_order(parameter: torch.Tensor) -> tuple[int, ...]:
    """Dimensions of a full parameter from the outermost to the innermost in memory; empty for a contiguous one."""
    if isinstance(parameter, DTensor) or parameter.is_contiguous():
        return ()
    order = sorted(range(parameter.dim()), key=parameter.stride().__getitem__, reverse=True)
    # With gaps or overlaps it has no order: its readers get a contiguous one.
    return tuple(order) if parameter.permute(order).is_contiguous() else ()


def bind(param: FSDPParam, parameter: nn.Parameter, policy: UnitPolicy) -> None:
    """Copies values into a parameter's shard, and registers a DTensor that is a view of it.

    Args:
        param: Its `parameter` is set.
        parameter: Sharded as `param` is, then it keeps its identity, or full, then it is replaced.
        policy: Of the parameter's unit.

    Raises:
        ConfigError: If the parameter is a DTensor of another mesh or placement, or one that torch cannot swap.
    """
    mesh, placements = _layout(param, policy)
    _detach_from_flat(param, parameter)
    if _is_sharded(parameter, param.tensor_parallel):
        assert isinstance(parameter, DTensor)
        if not _have_same_ranks(parameter.device_mesh, mesh) or tuple(parameter.placements) != placements:
            raise ConfigError(
                f"the parameter is a DTensor with placements {tuple(parameter.placements)} on {parameter.device_mesh}",
                where=param.name,
                instead=f"a full tensor, or one with placements {placements} on {mesh}",
            )
        if param.extension is None:
            param.sharded_view.copy_(local_tensor(parameter).detach())
        else:
            param.sharded_view = local_tensor(parameter)
        if parameter.device_mesh != mesh:  # its dimensions have other names, and the two would not mix
            torch.utils.swap_tensors(parameter, _sharded_parameter(parameter, param.sharded_view, mesh, placements))
        set_local_tensor(parameter, param.sharded_view)
        param.parameter = parameter
    elif isinstance(parameter, DTensor):
        assert param.tensor_parallel is not None
        param.tensor_parallel.refuse_other_layout(param.name, parameter)
        check_params.refuse_references(param.name, parameter)
        local = local_tensor(parameter).detach()
        param.sharded_view.copy_(local_part(local, param.spec.dim, policy.size, policy.rank))
        parameter.grad = None
        # It keeps its identity: before and after it is a DTensor of the same whole.
        torch.utils.swap_tensors(parameter, _sharded_parameter(parameter, param.sharded_view, mesh, placements))
        set_local_tensor(parameter, param.sharded_view)
        param.parameter = parameter
    else:
        with torch.no_grad():
            if param.extension is None:
                param.sharded_view.copy_(param.own_part(parameter.detach()))
            else:
                param.sharded_view = shard_of(parameter.detach(), policy.size, policy.rank, param.sharded_view.device)
        param.parameter = _sharded_parameter(parameter, param.sharded_view, mesh, placements)
        move_hooks(parameter, param.parameter)
        if parameter.requires_grad and is_saved_by_autograd(parameter):
            post_backward.await_late_gradient(parameter, param)
        replaced_params.mark_replaced(parameter, param)
    param.dtensor_storage = param.parameter.untyped_storage()
    for module, attribute in param.module_refs:
        module._parameters[attribute] = param.parameter


def _is_sharded(parameter: nn.Parameter, tensor_parallel: TensorParallel | None) -> bool:
    """Whether a parameter is a DTensor that is sharded, not one that is split over its tensor-parallel mesh alone."""
    if not isinstance(parameter, DTensor):
        return False
    return tensor_parallel is None or tensor_parallel.is_sharded(parameter)


def _layout(param: FSDPParam, policy: UnitPolicy) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The mesh and the placements of a sharded parameter."""
    if param.tensor_parallel is None:
        return policy.mesh, policy.mesh_placement.placements(param.spec.dim)
    split = param.tensor_parallel
    return split.sharded_mesh(policy.mesh), split.sharded_placements(policy.mesh_placement, param.spec.dim)


def _have_same_ranks(one: DeviceMesh, other: DeviceMesh) -> bool:
    return one.device_type == other.device_type and torch.equal(one.mesh, other.mesh)


def give_memory(param: FSDPParam, policy: UnitPolicy, device: torch.device) -> None:
    """Gives a parameter on meta uninitialized memory on `device`."""
    local = torch.empty(param.sharded_size, dtype=param.parameter.dtype, device=device)
    made = _sharded_parameter(param.parameter, local, *_layout(param, policy))
    # It keeps its identity, by which optimizers refer to it.
    torch.utils.swap_tensors(param.parameter, made)


def _detach_from_flat(param: FSDPParam, successor: nn.Parameter) -> None:
    """Gives a replaced parameter memory of its own."""
    replaced = param.parameter
    if replaced is not successor and isinstance(replaced, DTensor) and local_tensor(replaced) is param.sharded_view:
        # An optimizer may still refer to it, and write into it.
        set_local_tensor(replaced, param.sharded_view.clone())


def _sharded_parameter(
    full: nn.Parameter, local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> nn.Parameter:
    dtensor = new_dtensor(local, mesh, placements, full.shape)
    sharded = nn.Parameter(dtensor, requires_grad=full.requires_grad)
    set_local_tensor(sharded, local)  # type: ignore[arg-type]  # nn.Parameter made an alias of it
    for attribute, value in vars(full).items():  # marks that users and libraries put on parameters
        if not (is_wrapper(full) and isinstance(value, torch.Tensor)):  # one of the tensors that it wraps
            setattr(sharded, attribute, value)
    share_hooks(full, sharded)
    return sharded
