"""What no rank would average, or what would be averaged twice: refused by name.

A compiled plain model is all that is sharded. Other plain parameters that are trained with it (the rest of a model, or
what a compiled function reads) would become another copy on each rank; DDP and FSDP1 average gradients themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fsdp_compile._torch import fully_shard as fsdp2
from fsdp_compile._torch.dynamo import OptimizedModule, modules_being_called, values_on_the_way
from fsdp_compile._torch.fully_shard_calls import is_replicated
from fsdp_compile._torch.tensors import is_gathered
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.fsdp2 import stale
from fsdp_compile.fsdp2.module_class import user_class
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.fsdp2.updates import user_hooks
from fsdp_compile.sharding.arguments import is_whole

_WHOLE = "torch.compile(model, backend='fsdp') of the whole model, which shards it, or fully_shard(model) first"
WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel)

waiting: weakref.WeakKeyDictionary[nn.Module, Mapping[str, Any] | None] = weakref.WeakKeyDictionary()
"""Compiled modules that were not called yet, and the options of their compile."""
sharded: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Modules that their first call has sharded, and the options for `fully_shard` with which it did."""


def places_of(module: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], tuple[str, nn.Parameter]]]:
    """Where the parameters of a model are registered, with their names from its root."""
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield (owner, name), (f"{path}.{name}".removeprefix("."), parameter)


def ids_in(modules: Iterable[nn.Module]) -> set[int]:
    """The identities of all parameters that are registered in some modules now."""
    parts = {part for module in modules for part in module.modules()}
    return {id(p) for part in parts for p in part._parameters.values() if p is not None}


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, WRAPPERS) or is_replicated(module)


def refuse(module: nn.Module, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises `ConfigError` or `UnsupportedModelError` for a plain model that cannot be sharded in its first call.

    It may be in or around another data parallelism or a part of a plain model, and its parameters may have gradients,
    hooks, or no contiguous memory, or be those of TorchScript.
    """
    for path, part in module.named_modules():
        if _is_wrapper(part):
            raise _refuse_wrapper(part, path or type(part).__name__)
        if isinstance(part, torch.jit.ScriptModule) and any(True for _ in part.parameters(recurse=False)):
            raise UnsupportedModelError(
                "TorchScript reads the parameters of its modules directly, so they cannot be gathered for it",
                where=path or "the outermost module",
                instead="the module without torch.jit.script or torch.jit.trace: torch.compile takes their place",
            )
    for name, parameter in named:
        if not is_whole(parameter) and not parameter.is_contiguous():
            raise UnsupportedModelError(
                f"a parameter is not contiguous: shape {tuple(parameter.shape)}, strides {parameter.stride()}",
                where=name,
                instead="a contiguous one, as nn.Parameter(p.contiguous()) makes it",
            )
        if parameter.grad is not None:
            raise ConfigError(
                "a parameter has a gradient from before it was sharded, of only this rank's data",
                where=name,
                instead="step with it or drop it (model.zero_grad()) before the first compiled call",
            )
        if hooks := user_hooks(parameter):
            hook: Any = hooks[0]
            code = getattr(hook, "__code__", None)
            title = getattr(hook, "__qualname__", type(hook).__qualname__)
            begin = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
            raise ConfigError(
                "a parameter has hooks on its gradient, and its sharded successor would not",
                where=f"{name}, hook {title}{begin}",
                instead="fully_shard(model) before the hooks are registered. A gradient `g` is a DTensor there, so a "
                "whole mask becomes one, too: g * distribute_tensor(mask, g.device_mesh, g.placements)",
            )
    _refuse_plain_rest(module)


def refuse_meta(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises `ConfigError` for a parameter on the meta device, with its name."""
    for name, parameter in named:
        if parameter.is_meta:
            raise ConfigError(
                "a parameter is on the meta device: it has no value",
                where=name,
                instead="fsdp_compile.fully_shard(model, param_init_fn=...) or model.to_empty() and an initialization, "
                "before the first call",
            )


def _refuse_plain_rest(module: nn.Module) -> None:
    """Refuses DDP around a module, and models of which it is a part and whose rest is plain and trained."""
    for around in modules_being_called():
        if around is None or isinstance(around, OptimizedModule) or around is module:
            continue
        if isinstance(around, WRAPPERS):
            raise _refuse_wrapper(around, type(around).__name__)
        if module not in set(around.modules()) or not torch.is_grad_enabled():
            continue
        averaged = ids_in([module, *waiting, *fsdp2.sharded_modules()])
        for _, (name, parameter) in places_of(around):
            if parameter.requires_grad and id(parameter) not in averaged:
                raise ConfigError(
                    f"only a part of a model is compiled, {type(module).__name__}: the gradients of the rest would be "
                    "averaged by no rank",
                    where=f"{type(around).__name__}, parameter {name}",
                    instead=_WHOLE,
                )


def _refuse_wrapper(wrapper: nn.Module, where: str) -> ConfigError:
    name = type(wrapper).__name__
    return ConfigError(
        f"{name} averages gradients by itself, and so does backend='fsdp'",
        where=where,
        instead=f"the model without {name}: `model = wrapped.module` (of FSDP1, a new one, docs/migrate.md), then "
        "torch.compile(model, backend='fsdp'); a framework that wraps models (the Trainer, accelerate, Fabric) is told "
        "not to as docs/frameworks.md shows",
    )


def refuse_wrapper_around(module: nn.Module, _name: str, child: nn.Module | None) -> None:
    """Raises `ConfigError` for DDP or FSDP1 around a compiled model, when it is made."""
    if isinstance(module, WRAPPERS) and child is not None:
        for part in child.modules():
            inner = part._orig_mod if isinstance(part, OptimizedModule) else part
            # What the user has sharded alone, the wrapper may have been told to ignore.
            if inner in sharded or (inner in waiting and not fsdp2.states_below(inner)):
                raise _refuse_wrapper(module, f"{type(module).__name__}({user_class(inner).__name__})")


_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that have stepped with gradients."""


def refuse_plain_rest_of_optimizer(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Refuses an optimizer of models that their first call has sharded, and of others that no rank averages."""
    if not sharded or optimizer in _checked:
        return
    trained = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    if trained:  # there are none yet before the first call of a closure
        _checked.add(optimizer)
    by_compile = ids_in(sharded)
    if by_compile.isdisjoint(trained) or all(isinstance(p, DTensor) for p in trained.values()):
        return
    plain = trained.keys() - ids_in(fsdp2.sharded_modules())
    if plain and not all(isinstance(trained[i], DTensor) for i in plain):
        raise ConfigError(
            "an optimizer trains parameters that were sharded when a module was compiled, and others that no rank "
            "averages",
            where=f"{type(optimizer).__name__}: {len(plain)} of {len(trained)} parameters with gradients are plain",
            instead=_WHOLE,
        )


def refuse_plain(gm: fx.GraphModule, inputs: Sequence[object]) -> None:
    """Raises `ConfigError` for plain parameters that a graph would train, each rank by itself."""
    averaged: set[int] | None = None
    for placeholder, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if type(value) is stale.StaleParameter:
            raise stale.refusal(value, "compiled code")
        if not isinstance(value, nn.Parameter) or isinstance(value, DTensor) or ParamGroup.of(value) is not None:
            continue
        if not value.requires_grad or not torch.is_grad_enabled():  # each rank computes with its whole copy
            continue
        if is_gathered(value):  # by an earlier graph
            continue
        # FSDP2 registers gathered parameters, which are plain; others stay whole.
        averaged = ids_in(fsdp2.sharded_modules()) if averaged is None else averaged
        way = [module for module in values_on_the_way(placeholder) if isinstance(module, nn.Module)]
        if id(value) not in averaged and not any(map(fsdp2.states_below, way)):
            places = ((owner, name) for owner in way for _, (name, p) in places_of(owner) if p is value)
            named = (f"{type(owner).__name__}, parameter {name}" for owner, name in places)
            raise _of_plain_model(next(named, placeholder.name), way)


def refuse_plain_forward(module: nn.Module) -> None:
    """Raises `ConfigError` for a forward that trains a plain model: behind graph breaks, Python may read parameters."""
    if not torch.is_grad_enabled() or fsdp2.states_below(module):
        return
    named = [each for _, each in places_of(module) if each[1].requires_grad and not isinstance(each[1], DTensor)]
    averaged = ids_in(fsdp2.sharded_modules()) if named else set()
    if plain := next((name for name, parameter in named if id(parameter) not in averaged), None):
        raise _of_plain_model(f"{user_class(module).__name__}, parameter {plain}", [module])


def _of_plain_model(where: str, way: Sequence[nn.Module]) -> ConfigError:
    for around in (*way, *modules_being_called()):
        if around is not None and _is_wrapper(around):
            return _refuse_wrapper(around, type(around).__name__)
    return ConfigError(
        "compiled code trains a plain model, whose gradients no rank would average", where=where, instead=_WHOLE
    )
