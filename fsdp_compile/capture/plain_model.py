"""Shards a plain model when its compiled form is called first.

A module that is compiled itself is sharded before its forward begins. Of one that a compiled function calls, the
backend learns after the trace, when the graph reads plain parameters: it shards the module that owns them and asks
Dynamo to trace the frame again, which then reads from flat parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx, nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.autograd import outside_of_transforms
from fsdp_compile._torch.dynamo import source_prefixes
from fsdp_compile.capture.before_first_call import Found
from fsdp_compile.capture.beside import refuse_plain_rest, refuse_wrappers_around
from fsdp_compile.capture.first_call import (
    compiled_modules,
    modules_on_the_stack,
    modules_on_the_way,
    refuse_inside_lbfgs,
    refuse_missed_casts,
)
from fsdp_compile.capture.reject_registry_reads import refuse_registry_reads
from fsdp_compile.capture.shared_parts import shared_parts
from fsdp_compile.capture.unreached import PlainModels
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.modules.eager_reads import is_gathered
from fsdp_compile.modules.forward import enter_own_forward
from fsdp_compile.modules.param_views import is_swapped_in
from fsdp_compile.options import FSDPOptions
from fsdp_compile.runtime.module_state import (
    ignored_parameters,
    is_ignored,
    is_sharded,
    state_of,
    stored_parameters,
    units,
)
from fsdp_compile.runtime.replaced_params import ReplacedParameter
from fsdp_compile.runtime.units import FSDPParamGroup
from fsdp_compile.sharding import initial_values
from fsdp_compile.sharding.adopt import is_any_wrapped
from fsdp_compile.sharding.checks import added_later, refuse_meta
from fsdp_compile.sharding.fully_shard import fully_shard
from fsdp_compile.sharding.wrappers import refuse_wrappers


def shard_plain_models(gm: fx.GraphModule, inputs: Sequence[object], options: FSDPOptions, plain: PlainModels) -> bool:
    """Shards each module whose plain parameters are inputs of a Dynamo graph; `options.sharding` goes to `fully_shard`.

    Args:
        gm: The graph.
        inputs: Its inputs.
        options: Of the compile.
        plain: Knows which modules are compiled and not sharded yet.

    Returns:
        Whether anything was sharded, so that the frame has to be traced again.

    Raises:
        ConfigError: If a parameter is on the meta device, there is no process group and no torchrun environment, the
            model is wrapped by another data parallelism, or mixed precision would cast what the running call was given.
        UnsupportedModelError: If a parameter belongs to no module, or to a compiled part of one whose rest is plain.
    """
    for module in compiled_modules():
        refuse_wrappers(module)
    sharded = False
    for placeholder, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if not _is_plain(value):
            continue
        module = _owner(placeholder, value)
        if is_sharded(module):
            _refuse_shown(module, value)
            if is_ignored(module, value) or not _is_unclaimed(module, value):
                continue
            raise added_later(_name_in(module, value))
        refuse_registry_reads(placeholder)
        _shard(module, options, plain)
        sharded = True
    return sharded


def shard_before_forward(module: nn.Module, options: FSDPOptions, plain: PlainModels) -> Found:
    """Shards a module that is about to be called, as `shard_plain_models` does, if it is plain.

    Raises:
        ConfigError, UnsupportedModelError: As `shard_plain_models`.
        RankMismatchError: If ranks have different values.
    """
    if is_sharded(module):
        return Found.NOTHING
    parameters = list(stored_parameters(module))
    # What torch's `fully_shard` has sharded is taken over, before its own hooks run.
    if is_any_wrapped(module) or any(is_swapped_in(p) for p in parameters):
        return Found.VALUES
    ignored = ignored_parameters()
    if not any(_is_plain(p) and id(p) not in ignored for p in parameters):
        is_own = all(isinstance(p, nn.Parameter) for p in parameters)
        return Found.NOTHING if is_own else Found.VALUES
    with outside_of_transforms():
        _shard(module, options, plain)
        for model in dict.fromkeys(unit.model for unit in units(module)):
            initial_values.compare(model)
    return Found.SHARDED


def _shard(module: nn.Module, options: FSDPOptions, plain: PlainModels) -> None:
    refuse_meta(module)
    called = modules_on_the_stack()
    refuse_wrappers_around(called)
    refuse_plain_rest(called, module, plain)
    refuse_inside_lbfgs(module)
    before = set(units(module))
    for part in shared_parts(module, plain.roots()):
        fully_shard(part, **options.sharding)
    fully_shard(module, **options.sharding)
    for unit in units(module):
        if unit not in before:
            unit.sharded_with = options.sharding
    refuse_missed_casts(module)


def enter_assigned_forwards(inputs: Sequence[object]) -> bool:
    """Makes reads gather in forwards that were assigned to modules after they were sharded.

    Returns:
        Whether there were any among the modules of the models that a graph reads, so that its frame has to be traced
        again: each call of such a forward is to check the parameters first.
    """
    models = {group.unit.model for group in _groups(inputs)}
    roots = [unit.root_ref() for model in models for unit in model.units]  # none of modules that were deleted
    parts = {part for root in roots if root is not None for part in root.modules()}
    entered = [part for part in parts if state_of(part) is not None and enter_own_forward(part)]
    return bool(entered)


def compare_initial_values(inputs: Sequence[object]) -> None:
    """Compares, once, what each model of a graph was sharded with; raises `RankMismatchError` if ranks differ."""
    for model in dict.fromkeys(group.unit.model for group in _groups(inputs)):
        initial_values.compare(model)


def refuse_unused_sharding(inputs: Sequence[object], options: FSDPOptions) -> None:
    """Refuses options for `fully_shard` where the model is sharded already in another way: they would do nothing.

    Raises:
        ConfigError: If there are such options, and no unit of the model was sharded with them.
    """
    units_read = {group.unit for group in _groups(inputs)}
    if not options.sharding or not units_read:
        return
    # A graph may read no more than a part that was sharded before the rest.
    earlier = [unit.sharded_with for model in {u.model for u in units_read} for unit in model.units]
    by_backend = [made for made in earlier if made is not None]
    differing = [_different(options.sharding, made) for made in by_backend]
    if not by_backend:
        name = next(iter(options.sharding))
        raise ConfigError(
            f"option {name!r} says how to shard, and the model was sharded before it was compiled",
            where=f"options={{{name!r}: ...}}",
            instead=f"fully_shard(model, {name}=...), or compile the plain model",
        )
    if all(differing):
        name = differing[0][0]
        raise ConfigError(
            f"option {name!r} says how to shard, and an earlier compile has sharded the model without it or with "
            "another value",
            where=f"options={{{name!r}: ...}}",
            instead=f"the same {name!r} in all compiles of the model (which of them is called first shards it), or "
            f"fully_shard(model, {name}=...) before and in none",
        )


def _different(asked: Mapping[str, Any], made_with: Mapping[str, Any]) -> list[str]:
    """The options that are asked for and were not made with."""
    return [name for name, value in asked.items() if name not in made_with or not _alike(value, made_with[name])]


def _alike(one: object, other: object) -> bool:
    """Whether two values of an option mean the same; wrap policies that are made anew are not equal to each other."""
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        return (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords)
    if isinstance(one, ModuleWrapPolicy | CustomPolicy) and type(one) is type(other):
        return vars(one) == vars(other)
    return one == other


def _groups(inputs: Sequence[object]) -> list[FSDPParamGroup]:
    found = [FSDPParamGroup.of(value) for value in inputs if isinstance(value, torch.Tensor)]
    return [group for group in found if group is not None]


def _refuse_shown(module: nn.Module, parameter: nn.Parameter) -> None:
    if is_swapped_in(parameter):
        raise ConfigError(
            "a compiled model is called while its parameters are held in full",
            where=f"inside full_params(), {_name_in(module, parameter)}",
            instead="call the plain model there, which is full too; for a model that was compiled in place, inside of "
            "`with torch.compiler.set_stance('force_eager'):`; or leave the context first",
        )


def _is_plain(value: object) -> TypeGuard[nn.Parameter]:
    return (
        isinstance(value, nn.Parameter)
        and not isinstance(value, DTensor | ReplacedParameter)
        and not is_gathered(value)
        and FSDPParamGroup.of(value) is None
    )


def _is_unclaimed(module: nn.Module, parameter: nn.Parameter) -> bool:
    return any(p is parameter for p in stored_parameters(module))


def _owner(placeholder: fx.Node, parameter: nn.Parameter) -> nn.Module:
    """The outermost compiled module that owns a parameter."""
    for module in (*compiled_modules(), *modules_on_the_way(placeholder)):
        if _is_unclaimed(module, parameter):
            return module
    expressions = source_prefixes(placeholder)
    raise UnsupportedModelError(
        "the compiled function reads a parameter that belongs to no torch.nn.Module",
        where=expressions[-1] if expressions else placeholder.name,
        instead="make it an attribute of a module, or pass a plain tensor (requires_grad=True) to keep it unsharded",
    )


def _name_in(module: nn.Module, parameter: nn.Parameter) -> str:
    return next((name for name, p in nn.Module.named_parameters(module) if p is parameter), "?")
