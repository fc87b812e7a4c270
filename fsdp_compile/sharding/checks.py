"""What `fully_shard` refuses before it changes anything, and what it ignores."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.modules.classes import original_class
from fsdp_compile.runtime.module_state import (
    ParamRef,
    is_ignored,
    is_sharded,
    named_stored_parameters,
    reads_of,
    stored_parameters,
    units,
)
from fsdp_compile.runtime.replaced_params import ReplacedParameter, current
from fsdp_compile.runtime.units import FSDPUnit
from fsdp_compile.sharding.wrappers import refuse_wrappers

_OPTION = "fully_shard(ignored_params=...)"


@dataclasses.dataclass(frozen=True)
class Ignored:
    """The ignored parameters of one call, by `id`, and the modules that were listed."""

    ids: set[int] = dataclasses.field(default_factory=set)
    modules: list[nn.Module] = dataclasses.field(default_factory=list)


def ignored_in(root: nn.Module, listed: object) -> Ignored:
    """What one call ignores in `root`; `listed` is `None`, or parameters and modules, which stand for their parameters.

    Raises:
        ConfigError: If something else is listed, a listed module or parameter is sharded already, or is `root` itself.
    """
    expected = "an iterable of parameters and modules of the model"
    if listed is None:
        return Ignored()
    if not isinstance(listed, Iterable) or isinstance(listed, str):
        raise ConfigError(f"ignored_params is {listed!r}", where=_OPTION, instead=expected)
    ignored, parameters = Ignored(), []
    for each in listed:
        if isinstance(each, nn.Module):
            ignored.ids.update(_parameters_of(each, root))
            ignored.modules.append(each)
        elif isinstance(each, nn.Parameter):
            parameters.append(each)
            ignored.ids.add(id(each))
        else:
            raise ConfigError(f"it contains {each!r}, a {type(each).__name__}", where=_OPTION, instead=expected)
    _refuse_sharded(parameters, root)
    return ignored


def _refuse_sharded(listed: Iterable[nn.Parameter], root: nn.Module) -> None:
    """Raises `ConfigError` for a parameter that is sharded already, given as it is now or as it was before."""
    # Others that `root` does not have are no mistake: code for FSDP2 gives the whole model's list to each block's call.
    late = {id(current(p)) for p in listed} & {id(param.parameter) for unit in units(root) for param in unit.params}
    for name in (name for name, parameter in named_stored_parameters(root) if id(parameter) in late):
        raise ConfigError(
            "a parameter to ignore is sharded already",
            where=f"{_OPTION}, {name}",
            instead="ignore it in the first call of fully_shard() on a module that has it, or do not list it",
        )


def _parameters_of(module: nn.Module, root: nn.Module) -> set[int]:
    where = f"{_OPTION}, {original_class(module).__name__}"
    if module is root:
        raise ConfigError(
            "the module to shard is ignored itself, so nothing is left of it",
            where=where,
            instead="leave the call out, or ignore modules in it",
        )
    if any(reads_of(part) for part in module.modules()):
        raise ConfigError(
            "a module to ignore is sharded already",
            where=where,
            instead="ignore it in the first call of fully_shard(), or do not list it",
        )
    return {id(parameter) for parameter in stored_parameters(module)}


def roots_of(target: object) -> tuple[nn.Module, ...]:
    """The modules of a call of `fully_shard`: one, or those of a list that are in no other one of it.

    Raises:
        ConfigError: As `refuse_root`, or if the list is empty.
    """
    if not isinstance(target, list | tuple):
        refuse_root(target)
        return (target,)  # type: ignore[return-value]
    if not target:
        raise ConfigError("the list is empty", where="fully_shard([...])", instead="modules that become one unit")
    for each in target:
        refuse_root(each)
    listed: dict[nn.Module, None] = dict.fromkeys(target)
    inside = {part for module in listed for part in module.modules() if part is not module}
    return tuple(module for module in listed if module not in inside)


def refuse_policy_for_list(wrap_policy: object, *, is_list: bool) -> None:
    """Raises `ConfigError` for a wrap policy in a call on a list of modules, which become one unit."""
    if is_list and wrap_policy is not None:
        raise ConfigError(
            "a list of modules becomes one unit, and a wrap policy would choose others",
            where="fully_shard([...], auto_wrap_policy=...)",
            instead="one of the two",
        )


def refuse_root(module: object) -> None:
    """Raises `ConfigError` for a root that cannot be sharded: no module, or a container without forward."""
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"{type(module).__name__} is not a torch.nn.Module",
            where="fully_shard(module)",
            instead="pass the module whose parameters are to be sharded",
        )
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise ConfigError(
            f"{original_class(module).__name__} has no forward",
            where="fully_shard(module)",
            instead="call fully_shard() on its children, or on the module that holds it",
        )


def refuse_reshard(reshard_after_forward: object) -> None:
    """Raises `ConfigError` for a `reshard_after_forward` of a type that is not supported."""
    if reshard_after_forward not in (None, "auto") and not isinstance(reshard_after_forward, int):
        raise ConfigError(
            f"reshard_after_forward={reshard_after_forward!r} is not supported",
            where="fully_shard(reshard_after_forward=...)",
            instead='True (gather again in backward), False (keep for backward), "auto" (keep what there is room for), '
            "a divisor of the shard group or None",
        )


def refuse_module(module: nn.Module) -> None:
    """Raises `ConfigError` for a module that is sharded already or in part, by this package or by another."""
    refuse_wrappers(module)
    if is_sharded(module):
        raise ConfigError(
            "this module is sharded already",
            where=f"fully_shard({original_class(module).__name__})",
            instead="call fully_shard() once per module, children before parents",
        )
    refuse_part(module, units(module))


def refuse_meta(root: nn.Module) -> None:
    """Raises `ConfigError` for a plain parameter on the meta device, which a compiled call would read."""
    for name, parameter in named_stored_parameters(root):
        if parameter.device.type == "meta" and not isinstance(parameter, DTensor | ReplacedParameter):
            raise ConfigError(
                "a parameter is on the meta device and has no value yet",
                where=name,
                instead="call fully_shard(model) and fsdp_compile.materialize(model), or fully_shard(model, "
                "param_init_fn=...), which initialize it; or fully_shard(model), then model.to_empty(device=...), then "
                "load a checkpoint, before the first step",
            )


def refuse_part(module: nn.Module, units_below: Iterable[FSDPUnit]) -> None:
    """Raises `ConfigError` for a module whose parameters are in a unit of a call on a module above it.

    Args:
        module: The module.
        units_below: Units of earlier calls on it and on modules in it.
    """
    known = set(units_below)
    for name, part in module.named_modules():
        for _, group, _ in reads_of(part).values():
            # A parameter whose first place is in another module is tied, and belongs to that module's unit.
            is_first = any(param.module_refs[0][0] is part for param in group.params if param.module_refs)
            if is_first and group.unit not in known:
                raise ConfigError(
                    "the parameters of this module were sharded by a call on a module above it",
                    where=f"fully_shard({original_class(module).__name__})" + (f", {name}" if name else ""),
                    instead="call fully_shard() on children before parents, and first on what two models share; or "
                    "compile both models before the first call of either",
                )


def refuse_renormalized(places: Iterable[ParamRef]) -> None:
    """Raises `UnsupportedModelError` for an embedding whose forward scales rows of its weight."""
    for name, module, _, _ in places:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UnsupportedModelError(
                f"max_norm={module.max_norm} makes forward write into the weight, of which each rank has a part",
                where=name or "the module itself",
                instead="max_norm=None, and rows scaled between steps; or list the module in ignored_params",
            )


def refuse_gradients(root: nn.Module, ignored: Container[int]) -> None:
    """Raises `ConfigError` for a plain parameter that has a gradient: of this rank alone, never reduced."""
    for name, parameter in root.named_parameters():
        if isinstance(parameter, DTensor | ReplacedParameter) or id(parameter) in ignored:
            continue
        if parameter.grad is not None:
            raise ConfigError(
                "a parameter has a gradient from before it was sharded, of this rank's data alone",
                where=name,
                instead="step with it or drop it (model.zero_grad(set_to_none=True)) before fully_shard() or the first "
                "compiled call; or shard first",
            )


def refuse_scripted(name: str, module: nn.Module, ignored: Container[int]) -> None:
    """Raises `UnsupportedModelError` for a TorchScript module with parameters that are not ignored."""
    if any(id(parameter) not in ignored for parameter in module.parameters(recurse=False)):
        raise UnsupportedModelError(
            "TorchScript reads the parameters of its modules by itself, so they cannot be gathered for it",
            where=name or "the outermost module",
            instead="the module without torch.jit.script or torch.jit.trace (torch.compile takes their place), or list "
            "it in ignored_params",
        )


def refuse_new_parameters(root: nn.Module) -> None:
    """Raises `ConfigError` for a parameter that was added to a sharded module: its gradient would not be reduced."""
    if not holds_plain_parameters(root):  # the usual case, without making names
        return
    for path, module in root.named_modules():
        if is_sharded(module):
            for name, parameter in named_stored_parameters(module, path):
                is_known = isinstance(parameter, DTensor | ReplacedParameter) or is_ignored(root, parameter)
                if isinstance(parameter, nn.Parameter) and not is_known:
                    raise added_later(name)


def holds_plain_parameters(root: nn.Module) -> bool:
    """Whether some module in `root` has a parameter that is not sharded."""
    # `modules()` would make the name of every module on its way.
    todo = [root]
    while todo:
        module = todo.pop()
        for parameter in module._parameters.values():
            # A tensor that is no parameter is a value that `torch.func.functional_call` has put there.
            if isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor):
                return True
        todo.extend(child for child in module._modules.values() if child is not None)
    return False


def added_later(name: str) -> ConfigError:
    """The error for a parameter that was added to a module after it was sharded."""
    return ConfigError(
        "a parameter was added to a module after it was sharded",
        where=name,
        instead="add it before fully_shard() or the first compiled call, or list it in ignored_params",
    )


def check_init_fn(param_init_fn: object) -> None:
    """Raises `ConfigError` for a `param_init_fn` that cannot be called."""
    if param_init_fn is not None and not callable(param_init_fn):
        raise ConfigError(
            f"param_init_fn is a {type(param_init_fn).__name__}, which cannot be called",
            where="param_init_fn",
            instead="a function of one module that initializes the module's own parameters and buffers",
        )
