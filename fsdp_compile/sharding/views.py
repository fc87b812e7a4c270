"""Parameters that are no longer views of their flat parameter: found before a step, and copied back into place.

`.to()`, `load_state_dict(assign=True)`, `module.weight = nn.Parameter(...)` and `requires_grad_()` all replace or
change registered parameters. The next step would read the old values, and updates would go to memory that is never
gathered. So every step begins with a comparison of the identities of all parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.parametrize import is_parametrized

from fsdp_compile._torch.autograd import outside_of_transforms
from fsdp_compile._torch.eval_frame import calls_are_compiled
from fsdp_compile._torch.tensors import local_tensor
from fsdp_compile.comm.gather_extension import is_extended
from fsdp_compile.config.policy import compute_device
from fsdp_compile.errors import ConfigError
from fsdp_compile.modules.classes import follow_attributes, gather_params
from fsdp_compile.modules.eager_reads import holds_value, holds_values
from fsdp_compile.runtime import checked_groups, extended_reads, unshard
from fsdp_compile.runtime.group_state import ParamState
from fsdp_compile.runtime.module_state import ensure_state, units_below
from fsdp_compile.runtime.replaced_params import ReplacedParameter
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup, FSDPUnit
from fsdp_compile.runtime.unshard_args import refresh_unshard_args
from fsdp_compile.runtime.view_check import ViewCheck
from fsdp_compile.sharding import allocate, check_params, checks, initial_values
from fsdp_compile.sharding.mixed_precision import any_full_precision
from fsdp_compile.sharding.shard_placement import shard_dim


def check(unit: FSDPUnit) -> None:
    """Makes every parameter of `unit` a view again; raises `ConfigError` as `put_in_place`, or for one on meta."""
    put_in_place(unit)
    for group in unit.param_groups:
        if group.flat_param.device.type == "meta":
            raise ConfigError(
                "a parameter is on the meta device and has no value yet",
                where=unit.parameter_name(group.params[0]),
                instead="fsdp_compile.materialize(model), which initializes it, or model.to_empty(device=...) and a "
                "checkpoint, before the first step",
            )
        for param in group.params if group.is_extended else ():
            assert param.extension is not None
            param.extension.refuse_without_methods(param.sharded_view)


def put_in_place(unit: FSDPUnit) -> None:
    """Makes every parameter of `unit` a view again, with the values that are registered now.

    New dtypes, devices, shapes and trainability give the unit new parameter groups.

    Raises:
        ConfigError: If a parameter was removed, is of another mesh, or its `.data` was assigned to; or inside of a
            `full_params` of a part of the model.
    """
    refuse_unsharded(unit)
    if any(group.is_broken() for group in unit.param_groups):
        with outside_of_transforms():  # what is made here outlives an evaluation in inference mode
            for group in unit.param_groups:
                _keep_ties_of_meta(group)
            repaired = [repair_in_place(group) for group in unit.param_groups]
            if not all(repaired):
                allocate.allocate_flat_params(unit, members(unit))


def _keep_ties_of_meta(group: FSDPParamGroup) -> None:
    """Ties what a checkpoint has untied that was loaded into a model on meta with `assign=True`, as FSDP2 does."""
    # Once there are values, replacing a parameter at each of its places unties it, as in one process.
    for param in group.params if group.flat_param.is_meta else ():
        registered = [module._parameters.get(attribute) for module, attribute in param.module_refs]
        if any(parameter is None or parameter.is_meta for parameter in registered):
            continue
        for module, attribute in param.module_refs:
            module._parameters[attribute] = registered[0]


def check_inside_graph(group: FSDPParamGroup) -> None:
    """As `put_in_place`, for a compiled region: what does not fit in place is refused."""
    refuse_unsharded(group.unit)
    if group.is_extended and extended_reads.has_other_state(group):
        raise ConfigError(
            "a plain attribute of a shard, of its class or of its module changed, which its methods may read, "
            "and the compiled function cannot notice that in time",
            where=group.unit.parameter_name(group.params[0]),
            instead="compile the module itself (torch.compile(model, backend='fsdp'))",
        )
    if not group.is_broken():
        return
    for param in group.params:
        if any(holds_value(*place) for place in param.module_refs):
            raise ConfigError(
                "a value stands in the place of a parameter, and the compiled function cannot notice that in time",
                where=group.unit.parameter_name(param),
                instead="fully_shard(model), then torch.compile(model, backend='fsdp'), and "
                "torch.func.functional_call() of what that returns; or functional_call() of the uncompiled model",
            )
    if not repair_in_place(group):
        # The inputs of the region are chosen already: it would read the old flat parameter.
        changed = next(param for param in group.params if not _fits_now(param, group))
        raise ConfigError(
            "a parameter changed its dtype, device, shape or requires_grad, and the compiled function cannot notice "
            "that in time",
            where=group.unit.parameter_name(changed),
            instead="compile the module itself (torch.compile(model, backend='fsdp')), or a module that has it as a "
            "child; or make the change before the first compiled call",
        )


def refuse_removed(root: nn.Module) -> None:
    """Raises `ConfigError` if a sharded parameter below `root` was removed from its module since."""
    for unit in units_below(root):
        for param in unit.params:
            _registered(unit, param)


def refuse_unsharded(unit: FSDPUnit) -> None:
    """Raises `ConfigError` if modules of `unit` have full parameters: a `full_params` of a part of the model."""
    if unit.param_state is ParamState.UNSHARDED:
        raise ConfigError(
            "a forward reads sharded parameters of a model that is partly unsharded",
            where=f"inside full_params(), unit {unit.title}",
            instead="full_params(model) of the whole model that is called, or leave the context before the call",
        )


def repair_in_place(group: FSDPParamGroup) -> bool:
    """Copies replaced parameters into their shards, if all of them fit there as they are; returns whether they do."""
    if not all(_fits_now(param, group) for param in group.params):
        return False
    found = [(param, _registered(group.unit, param)) for param in group.params]
    with outside_of_transforms(), torch.no_grad():
        for param, registered in found:
            if registered is not None and (
                registered is not param.parameter or _local(registered) is not param.sharded_view
            ):
                allocate.bind(param, registered, group.unit.policy)
    allocate.follow_updaters(group.unit)
    return True


def _registered(unit: FSDPUnit, param: FSDPParam) -> nn.Parameter | None:
    """The parameter that is registered at all places now; `None` if there are several."""
    places = [place for place in param.module_refs if not holds_value(*place)]
    registered = [module._parameters.get(attribute) for module, attribute in places]
    if not registered:  # its modules are deleted, or read other values for now: it trains no longer
        return param.parameter
    if any(parameter is None for parameter in registered):
        is_now = any(is_parametrized(*place) for place in places)
        raise ConfigError(
            "a sharded parameter was parametrized" if is_now else "a sharded parameter was removed from its module",
            where=unit.parameter_name(param),
            instead=f"{'parametrize' if is_now else 'remove'} it before fully_shard() or the first compiled call",
        )
    if (
        registered[0] is param.parameter
        and _local(registered[0]) is param.sharded_view
        and registered[0].untyped_storage() is not param.dtensor_storage
    ):
        raise ConfigError(
            "`.data` of a sharded parameter was assigned to, which its DTensor does not notice: the value is lost",
            where=unit.parameter_name(param),
            instead="assign a new nn.Parameter to the module's attribute, or parameter.copy_(value) under no_grad()",
        )
    for parameter in registered:
        if not isinstance(parameter, DTensor | ReplacedParameter):
            assert parameter is not None
            check_params.refuse_class(unit.parameter_name(param), parameter)
    return registered[0] if all(parameter is registered[0] for parameter in registered) else None


def _fits_now(param: FSDPParam, group: FSDPParamGroup) -> bool:
    """Whether one parameter is registered at all places, and its values fit into its shard."""
    registered = _registered(group.unit, param)
    return registered is not None and _fits(registered, param, group.flat_param)


def _fits(registered: nn.Parameter, param: FSDPParam, leaf: nn.Parameter) -> bool:
    local = _local(registered)
    return (
        registered.shape == param.parameter.shape
        and local.dtype == leaf.dtype
        and local.device == leaf.device
        and registered.requires_grad == leaf.requires_grad
        and is_extended(local) is (param.extension is not None)
        and (param.extension is None or type(local) is type(param.sharded_view))
    )


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return local_tensor(parameter) if isinstance(parameter, DTensor) else parameter


def members(unit: FSDPUnit) -> list[allocate.ParamToShard]:
    """The registered parameters of a unit; some that were tied and no longer are become members of their own."""
    found: dict[int, allocate.ParamToShard] = {}
    for param in unit.params:
        for module, attribute in param.module_refs:
            if holds_value(module, attribute):
                raise ConfigError(
                    "the unit has to be laid out anew while a value stands in the place of one of its parameters",
                    where=unit.parameter_name(param),
                    instead="call the model once before torch.func.functional_call(), after its parameters were "
                    "converted or replaced",
                )
            parameter = module._parameters[attribute]
            assert parameter is not None
            known = found.get(id(parameter))
            if known is not None:
                known.module_refs.append((module, attribute))
                continue
            name = param.name if (module, attribute) == param.module_refs[0] else f"{param.name} ({attribute})"
            order = param.spec.order if isinstance(parameter, DTensor) and parameter is param.parameter else ()
            dim = _dim(unit, param, parameter)
            is_whole = any_full_precision(owner for owner, _ in param.module_refs)
            found[id(parameter)] = allocate.ParamToShard(
                name,
                [(module, attribute)],
                parameter,
                dim,
                order,
                keeps_own_dtype=is_whole,
                tensor_parallel=param.tensor_parallel,
            )
    return list(found.values())


def _dim(unit: FSDPUnit, param: FSDPParam, parameter: nn.Parameter) -> int | None:
    """The parameter's dimension, or the default one if a new parameter has another number of dimensions."""
    if parameter.dim() == len(param.sharded_size) and param.spec.dim is not None:
        return shard_dim(unit.parameter_name(param), parameter, unit.policy.size, Shard(param.spec.dim))
    return shard_dim(unit.parameter_name(param), parameter, unit.policy.size, None)


def pre_forward(root: nn.Module) -> None:
    """Makes parameters views again that no longer are, and unshards what is due, before a forward of `root`.

    Raises:
        ConfigError: As `check` and `checks.refuse_new_parameters`.
    """
    state = ensure_state(root)
    view_check = state.view_check
    if view_check is None or not view_check.is_intact():
        view_check = _put_in_place(root)
        # In compiled code a new parameter is an input of a graph, where the backend sees it; until then, check again.
        is_known = not calls_are_compiled() or not checks.holds_plain_parameters(root)
        state.view_check = view_check if is_known and not holds_values(root) else None
    for unit in view_check.units:
        if unit.replaced_groups:
            allocate.forget_replaced(unit)
    for group in view_check.extended:
        if extended_reads.follow_state(group):
            gather_params([group])  # graphs may read it no longer, or again
            refresh_unshard_args(group)
    unshard.pre_forward(view_check.units, view_check.models)
    checked_groups.note(view_check.groups, view_check.models)


def _put_in_place(root: nn.Module) -> ViewCheck:
    units = units_below(root)
    for unit in units:
        refuse_unsharded(unit)
    for unit in units:
        check(unit)
        follow_attributes(unit)
    for model in dict.fromkeys(unit.model for unit in units):
        initial_values.compare(model)
    # After the check, which takes parameters in that were put in the place of others.
    if not calls_are_compiled():
        checks.refuse_new_parameters(root)
    return ViewCheck.of(root, units)


def allocate_from_meta(unit: FSDPUnit, waiting: Sequence[FSDPParam], device: torch.device) -> None:
    """Moves parameters on meta to parameter groups on `device`, or on the host if offloaded."""
    if compute_device(unit.policy.offload, unit.policy.mesh.device_type):
        device = torch.device("cpu")
    for param in waiting:
        # Parameters keep their identity, parameter groups are made anew.
        allocate.give_memory(param, unit.policy, device)
    if waiting:
        put_in_place(unit)
