"""Models that torch's `fully_shard` has sharded: read, checked, and made ready to be sharded by the same calls of ours.

Each call of torch's becomes one of ours, bottom-up, with its modules, mesh, policies and settings. The parameters stay
the DTensors that they are, with their gradients, so that optimizers and their state stay valid; unit by unit their
local tensors move into flat parameters, so that no more than one unit's shards exist twice.
"""

from __future__ import annotations

import dataclasses
import graphlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_compile._torch.fsdp2 import Setting, WrappedCall, WrappedParam, original_class, wrapped_calls
from fsdp_compile._torch.tensors import FakeTensor, local_tensor
from fsdp_compile.comm.gather_extension import is_extended
from fsdp_compile.comm.mesh import mesh_placement
from fsdp_compile.comm.tensor_parallel import TensorParallel
from fsdp_compile.config.policy import as_mixed_precision, as_offload, host_buffer
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.modules.refused_methods import RefusedMethods
from fsdp_compile.runtime.gradients import refuse_hook_of_several
from fsdp_compile.runtime.module_state import is_sharded, stored_parameters
from fsdp_compile.sharding import check_params, checks, devices
from fsdp_compile.sharding.arguments import Arguments, InitFrom, UnitArguments, UnitChoices
from fsdp_compile.sharding.wrappers import refusal

_FSDP2 = "torch.distributed.fsdp.fully_shard"
_WHOLE = "fsdp_compile.fully_shard(model) of the whole model, or torch.compile(model, backend='fsdp') of it"


@dataclasses.dataclass(frozen=True)
class AdoptedCall:
    """One call of our `fully_shard` in the place of one of torch's.

    Attributes:
        call: Torch's.
        modules: Those that it was called on.
        ignored: Parameters in them that it has not sharded.
        dims: The dimension on which each of its parameters is sharded, by `id`.
        settings: What methods of its modules have set since.
    """

    call: WrappedCall
    modules: tuple[nn.Module, ...]
    choices: UnitChoices
    ignored: list[nn.Parameter]
    dims: dict[int, int]
    settings: list[Setting]

    def arguments(self) -> Arguments:
        """The arguments of the call, now that torch's is removed."""
        arguments = Arguments.read(
            list(self.modules),  # a list becomes one unit, also if it is one module
            self.choices,
            ignored_params=self.ignored,
            device_id=None,
            shard_placement_fn=lambda parameter: Shard(self.dims[id(parameter)]),
            auto_wrap_policy=None,
            param_init_fn=None,
            sync_module_states=False,
            separate_reduce_group=False,
        )
        return dataclasses.replace(arguments, init_from=InitFrom.SHARDS)

    def set_up(self) -> None:
        """Applies the settings, once all calls of the model are made."""
        for setting in self.settings:
            method: Callable[..., None] = getattr(self.modules[0], setting.method)
            method(setting.value, **({"recurse": False} if setting.recurses else {}))


def is_any_wrapped(root: nn.Module) -> bool:
    """Whether torch's `fully_shard` was called on a module in `root`."""
    return any(call.is_fully_shard for call in wrapped_calls(root))


def is_wrapped(module: nn.Module) -> bool:
    """Whether torch's `fully_shard` was called on this very module."""
    return any(call.is_fully_shard and module in call.modules for call in wrapped_calls(module))


def plan(root: nn.Module, starting: nn.Module | None) -> list[AdoptedCall]:
    """The calls that take over what torch's `fully_shard` has sharded in `root`, in their order; changes no value.

    Args:
        root: A model.
        starting: A module whose hooks have run in this call, and whose forward has not yet.

    Raises:
        ConfigError: If a forward or backward is running, gradients wait for their reduction, something was set that
            cannot be taken over, or calls on parts of a larger model are all that is in `root`.
        UnsupportedModelError: For a parameter that our `fully_shard` would refuse.
    """
    calls = wrapped_calls(root)
    if not calls:
        return []
    for call in calls:
        _refuse_other_torch(call)
    names = {id(module): name for name, module in root.named_modules()}
    titles = {call: ", ".join(_title(names.get(id(module), "")) for module in call.modules) for call in calls}
    for call, title in titles.items():
        _refuse_kind(call, title)
        _refuse_running(call, title, starting)
        _refuse_settings(call, title)
    _refuse_parts(root, calls)
    for call in calls:
        call.reshard()
    params = {call: list(call.params()) for call in calls}
    for call in calls:
        for param in params[call]:
            _refuse_param(param, call, names)
    sharded = {id(param.parameter) for held in params.values() for param in held}
    mesh = next((call.mesh for call in calls if call.mesh is not None), None)
    ordered = _bottom_up(calls, params, titles)
    return [_adopted(call, params[call], sharded, mesh) for call in ordered]


def remove(planned: Sequence[AdoptedCall]) -> None:
    """Removes torch's calls from the modules, which keep their parameters."""
    for each in planned:
        each.call.remove(_refuse_backward)


def refuse_arguments(function: Callable[..., object], given: Mapping[str, object]) -> None:
    """Raises `ConfigError` if a call on a module that torch has sharded says how to shard it.

    Args:
        function: The called one.
        given: Its arguments.
    """
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if parameter.default is not inspect.Parameter.empty and given[name] != parameter.default:
            raise ConfigError(
                f"{name} says how to shard, and {_FSDP2} has sharded this module already",
                where=f"fully_shard({name}=...)",
                instead=f"fully_shard(model) alone, which keeps units, meshes and policies; or {name}= in the calls of "
                f"{_FSDP2}",
            )


def _refuse_other_torch(call: WrappedCall) -> None:
    missing = call.missing_names()
    if missing:
        raise ConfigError(
            f"what {_FSDP2} makes of a model looks otherwise in torch {torch.__version__}: no {', '.join(missing)}",
            where=_FSDP2,
            instead="fsdp_compile.fully_shard() in its place, with the same arguments; or a torch of docs/versions.md",
        )


def _title(name: str) -> str:
    return name or "the outermost module"


def _refuse_running(call: WrappedCall, title: str, starting: nn.Module | None) -> None:
    if starting in call.modules and call.mp_policy.output_dtype is not None:
        raise ConfigError(
            f"mixed precision casts what this module returns, and its first call had begun before it was taken over "
            f"from {_FSDP2}",
            where=f"output_dtype={call.mp_policy.output_dtype}, {title}",
            instead="fsdp_compile.fully_shard(model) before the first call",
        )
    if not call.is_idle and call.modules != (starting,):
        raise ConfigError(
            f"{_FSDP2} has sharded this model, and is in the middle of its forward or backward",
            where=title,
            instead="fsdp_compile.fully_shard(model) before that call, or torch.compile(model, backend='fsdp') after "
            f"{_FSDP2}, which take it over; model.reset_iter_state() first if a forward or backward has failed",
        )
    if call.has_unreduced_gradients or not call.is_last_backward:
        raise ConfigError(
            f"gradients of {_FSDP2} wait for a later backward, or set_is_last_backward(False) announces one",
            where=title,
            instead="take the model over after the last backward of a step",
        )


def _refuse_kind(call: WrappedCall, title: str) -> None:
    if not call.is_fully_shard:
        raise refusal(call.modules[0], title)
    if call.has_several_meshes:
        raise ConfigError(
            "parameters of one unit are sharded over several meshes, or over dimensions of a larger one",
            where=title,
            instead="one mesh per call: no ShardPlacementResult, no dp_mesh_dims",
        )
    for module in call.modules:
        if original_class(module) is None:
            raise ConfigError(
                f"the class of a module was replaced after {_FSDP2} had done so, by {type(module).__name__}",
                where=title,
                instead="fsdp_compile.fully_shard(model) before that (torch.nn.utils.parametrize does it, say)",
            )


def _refuse_settings(call: WrappedCall, title: str) -> None:
    for setting in call.settings():
        if setting.method in vars(RefusedMethods):
            getattr(RefusedMethods, setting.method)(call.modules[0], setting.value)
        elif "prefetch" in setting.method and (call.mesh is None or call.modules[0] in setting.value):
            raise ConfigError(
                "a module prefetches itself, or has no parameters of its own whose gather others could follow",
                where=f"{setting.method}(), {title}",
                instead=f"{setting.method}([]) before",
            )


def _refuse_parts(root: nn.Module, calls: Sequence[WrappedCall]) -> None:
    """Refuses calls on modules that are not all in `root`, and modules that both packages have sharded."""
    inside = set(root.modules())
    for call in calls:
        named = [module for setting in call.settings() if "prefetch" in setting.method for module in setting.value]
        model = [module for modules in call.model for module in modules]
        outside = [module for module in (*call.modules, *named, *model) if module not in inside]
        if outside:
            raise ConfigError(
                f"only a part of a model that {_FSDP2} has sharded is compiled or sharded: "
                f"{type(outside[0]).__name__} is outside of it",
                where=type(root).__name__,
                instead=_WHOLE,
            )
    below = {part for call in calls for module in call.modules for part in module.modules()}
    if any(map(is_sharded, below)):
        raise ConfigError(
            f"parts of the model are sharded by this package, and others by {_FSDP2} above them",
            where=type(root).__name__,
            instead="one of the two for the whole model",
        )


def _refuse_param(param: WrappedParam, call: WrappedCall, names: Mapping[int, str]) -> None:
    module, attribute = param.module_refs[0]
    path = names[id(module)]
    name = f"{path}.{attribute}".removeprefix(".")
    parameter = param.parameter
    if not isinstance(parameter, DTensor) or call.mesh is None or not _is_laid_out(parameter, param.dim, call.mesh):
        raise UnsupportedModelError(
            f"a parameter is not the DTensor that {_FSDP2} has made, sharded over the mesh of its call",
            where=name,
            instead=f"a parameter that was not replaced after {_FSDP2}",
        )
    local = local_tensor(parameter)
    if type(local) not in (torch.Tensor, FakeTensor) and not is_extended(local):
        check_params.refuse_subclass(name, type(local))
    for hook in (parameter._backward_hooks or {}).values():
        refuse_hook_of_several(hook, name)
    checks.refuse_renormalized([(path, module, attribute, parameter)])


def _is_laid_out(parameter: DTensor, dim: int, mesh: DeviceMesh) -> bool:
    over = mesh_placement(None, mesh, reshard_after_forward=None, device_type=mesh.device_type)
    split = TensorParallel.of_sharded(parameter, mesh)
    if split is None:
        return parameter.device_mesh == mesh and tuple(parameter.placements) == over.placements(dim)
    try:
        is_on_both = parameter.device_mesh == split.sharded_mesh(mesh)
    except ValueError:  # the DTensor has nothing to do with the mesh of the call
        return False
    return is_on_both and tuple(parameter.placements) == split.sharded_placements(over, dim)


def _bottom_up(
    calls: Sequence[WrappedCall], params: Mapping[WrappedCall, list[WrappedParam]], titles: Mapping[WrappedCall, str]
) -> list[WrappedCall]:
    """The calls in an order in which each shards what those before it have left.

    Raises:
        UnsupportedModelError: If there is none.
    """
    below = {call: {part for module in call.modules for part in module.modules()} for call in calls}
    graph = {
        call: [other for other in calls if other is not call and not below[call].isdisjoint(other.modules)]
        for call in calls
    }
    try:
        ordered = list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        raise _unordered(titles[error.args[1][0]]) from None
    taken: set[int] = set()
    everything = {id(param.parameter) for held in params.values() for param in held}
    for call in ordered:
        own = {id(param.parameter) for param in params[call]}
        found = {id(p) for module in call.modules for p in stored_parameters(module)} & everything - taken
        if found != own:
            raise _unordered(titles[call])
        taken |= own
    return ordered


def _unordered(title: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"no order of calls of fully_shard() gives the units that {_FSDP2} has made",
        where=title,
        instead="children before parents, and parameters that are tied in one unit: fully_shard([a, b])",
    )


def _adopted(
    call: WrappedCall, params: Sequence[WrappedParam], sharded: set[int], mesh: DeviceMesh | None
) -> AdoptedCall:
    mesh = call.mesh or mesh
    choices = UnitChoices(None, mesh, call.reshard_after_forward, call.mp_policy, call.offload_policy)
    every = {id(p): p for module in call.modules for p in stored_parameters(module)}
    ignored = [p for i, p in every.items() if i not in sharded]
    checks.roots_of(list(call.modules))
    _refuse_choices(call, choices, {id(p) for p in ignored})
    dims = {id(param.parameter): param.dim for param in params}
    return AdoptedCall(call, call.modules, choices, ignored, dims, call.settings())


def _refuse_choices(call: WrappedCall, choices: UnitChoices, ignored: set[int]) -> None:
    """Raises `ConfigError` for what `fully_shard` would refuse among its arguments."""
    offload = as_offload(choices.offload_policy)
    if offload is not None:
        host_buffer(0, torch.float32, offload)
    policy = UnitArguments(
        None, choices.mesh, choices.reshard_after_forward, as_mixed_precision(choices.mp_policy), "cpu", offload
    ).policy()
    for module in call.modules:
        devices.refuse_misplaced(module, ignored, None, policy)
        for name, part in module.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                checks.refuse_scripted(name, part, ignored)


def _refuse_backward() -> NoReturn:
    raise ConfigError(
        f"the forward of this backward was one of {_FSDP2}, whose model was taken over since",
        where="backward",
        instead="backward() before the first call of the compiled model, or before fsdp_compile.fully_shard(model)",
    )
