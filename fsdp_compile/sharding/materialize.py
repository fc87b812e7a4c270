"""`materialize`: initializes a sharded model on the meta device, one module in full at a time."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_compile._torch.fully_shard import groups_below, offloads
from fsdp_compile._torch.fully_shard_calls import kept_with, plain_class
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.buffers import in_own_dtype
from fsdp_compile.sharding.arguments import InitFn, device_of
from fsdp_compile.sharding.replicated import ReplicatedParams

_INSTEAD = "a param_init_fn that writes all of it"


def materialize(model: nn.Module, param_init_fn: InitFn | None = None) -> None:
    """Initializes what is on the meta device in a sharded model; no rank ever has the full model in memory.

    One after the other, in the order of `model.apply`, each module that has parameters or buffers on meta gets them in
    full, is initialized under `no_grad`, and every rank gets its part of the first rank's values.

    Args:
        model: After `fully_shard`. What is not on meta keeps its values.
        param_init_fn: Called on each of these modules. It finds the module's own parameters and buffers with memory,
            or, if it does nothing then, on meta, for `to_empty(recurse=False)`. By default modules'
            `reset_parameters()`.

    Raises:
        ConfigError: If nothing is sharded; a module cannot initialize itself; `param_init_fn` left a parameter or
            buffer on meta or without a value, or changed its shape.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ConfigError(
            "nothing in this model is sharded",
            where=f"materialize({type(model).__name__})",
            instead="fully_shard(model) first; a model that needs no sharding is materialized by "
            "model.to_empty(device=...) and its own initialization",
        )
    names = {module: name for name, module in model.named_modules()}
    modules: list[nn.Module] = []
    model.apply(modules.append)
    with in_own_dtype(model):
        waiting = {m: on_meta for m in modules if (on_meta := [n for n, t in _own(m).items() if t.is_meta])}
        for module in waiting if param_init_fn is None else ():
            if not callable(getattr(module, "reset_parameters", None)):
                raise ConfigError(
                    f"a {type(module).__name__} has parameters or buffers on meta, and no reset_parameters()",
                    where=names[module] or "(root)",
                    instead="fully_shard(param_init_fn=...), or materialize(model, param_init_fn)",
                )
        work = _Work(model, param_init_fn or operator.methodcaller("reset_parameters"))
        for module, attributes in waiting.items():
            work.initialize(module, attributes, names[module])


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    held = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def _like(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value


def _put(module: nn.Module, attribute: str, value: torch.Tensor) -> None:
    if attribute in module._parameters:
        module._parameters[attribute] = value  # type: ignore[assignment]
    else:
        module._buffers[attribute] = value


def _is_untouched(now: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    if now is not before:
        return False
    return bool(now.isnan().all()) if now.is_floating_point() else now._version == version


class _Work:
    def __init__(self, model: nn.Module, init_fn: InitFn) -> None:
        self._init_fn = init_fn
        self._replaced: dict[torch.Tensor, torch.Tensor] = {}  # several modules may register one
        first = next(p for p in model.parameters() if isinstance(p, DTensor))
        self._mesh = first.device_mesh
        self._device = device_of(self._mesh)
        self._sends_to_host = any(map(offloads, groups_below(model)))
        kept: list[ReplicatedParams | None] = [kept_with(module, "replicated") for module in model.modules()]
        self._replicated = {p for each in kept if each is not None for p in each.params()}

    @torch.no_grad()
    def initialize(self, module: nn.Module, attributes: Iterable[str], name: str) -> None:
        """Gives a module its own tensors in full, runs its initialization, and keeps this rank's part."""
        own = _own(module)
        old = {attribute: own[attribute] for attribute in attributes}
        kept = {attribute: tensor for attribute, tensor in own.items() if attribute not in old}
        for attribute, tensor in kept.items():  # an initialization may write to it, and `to_empty()` replace it
            value = tensor.detach()
            _put(module, attribute, _like(tensor, value.full_tensor() if isinstance(value, DTensor) else value.clone()))
        for attribute, tensor in old.items():
            _put(module, attribute, _like(tensor, self._start(tensor)))
        blank = {attribute: (_own(module)[attribute], _own(module)[attribute]._version) for attribute in old}
        with plain_class(module):
            self._init_fn(module)
        made = {attribute: _own(module)[attribute] for attribute in old}
        if all(_is_untouched(made[attribute], *blank[attribute]) for attribute in old):
            for attribute, tensor in old.items():  # FSDP1's initializations look for what is on meta
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                _put(module, attribute, _like(tensor, empty))
            with plain_class(module):
                self._init_fn(module)
            made = {attribute: _own(module)[attribute] for attribute in old}
        for attribute, value in made.items():
            _put(module, attribute, self._finish(f"{name}.{attribute}".removeprefix("."), old[attribute], value))
        for attribute, tensor in kept.items():
            _put(module, attribute, tensor)

    def _start(self, old: torch.Tensor) -> torch.Tensor:
        known = self._replaced.get(old)
        if known is not None:
            return known.full_tensor() if isinstance(known, DTensor) else known.clone()
        blank = torch.empty(old.shape, dtype=old.dtype, device=self._device)
        return blank.fill_(float("nan")) if old.is_floating_point() else blank.zero_()

    def _finish(self, name: str, old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if value.is_meta:
            raise ConfigError("an initialization left it on meta", where=name, instead=_INSTEAD)
        if value.shape != old.shape or value.dtype != old.dtype:
            raise ConfigError(
                f"an initialization made it {value.dtype} of shape {tuple(value.shape)}",
                where=name,
                instead=f"{old.dtype} of shape {tuple(old.shape)}, as it was on meta",
            )
        if value.is_floating_point() and bool(value.isnan().any()):
            raise ConfigError(
                "an initialization left elements of it without a value (or made them NaN)", where=name, instead=_INSTEAD
            )
        value = value.detach().to(self._device)
        if isinstance(old, DTensor):
            if any(type(placement) not in (Shard, Replicate) for placement in old.placements):
                raise ConfigError(
                    "it is split by tensor parallelism on the dimension that FSDP2 splits, too",
                    where=name,
                    instead="model.to_empty(device=...) and the model's own initialization; or a checkpoint",
                )
            value = distribute_tensor(value, old.device_mesh, old.placements)
            value = value.cpu() if self._sends_to_host else value
        elif not isinstance(old, nn.Parameter) or old in self._replicated:
            for dim in range(self._mesh.ndim):
                dist.broadcast(value, group=self._mesh.get_group(dim), group_src=0)
        if old in self._replaced:
            self._replaced[old].copy_(value)
        else:
            self._replaced[old] = _like(old, value)
        return self._replaced[old]
