"""`materialize`: initializes a sharded model on the meta device, one module in full at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_compile._torch.fully_shard_calls import is_offloaded, note_of, plain_class
from fsdp_compile._torch.tensors import TorchDispatchMode, tree_leaves
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.buffers import in_own_dtype
from fsdp_compile.sharding.arguments import InitFn, device_of
from fsdp_compile.sharding.replicated import Place, ReplicatedParams

_INSTEAD = "a param_init_fn that writes all of it"


def materialize(model: nn.Module, param_init_fn: InitFn | None = None) -> None:
    """Initializes what is on the meta device in a sharded model; no rank ever has the full model in memory.

    One after the other, in the order of `model.apply`, each module that has parameters or buffers on meta gets them in
    full, is initialized under `no_grad`, and every rank gets its part of the first rank's values.

    Args:
        model: After `fully_shard`. What is not on meta keeps its values.
        param_init_fn: Called on each of these modules. It finds the module's own parameters and buffers with memory,
            or, if it does nothing then, on meta, for `to_empty(recurse=False)`. It may write to what is in modules
            below, which it is called for before: it is tried on meta first, on modules without own tensors too, and
            finds what it writes in full. By default modules' `reset_parameters()`.

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
    with in_own_dtype(model):
        _fill_in(model, param_init_fn)


def _fill_in(model: nn.Module, param_init_fn: InitFn | None) -> None:
    names = {module: name for name, module in model.named_modules()}
    waiting: dict[nn.Module, dict[Place, torch.Tensor]] = {}

    def look(module: nn.Module) -> None:
        waiting[module] = {(module, name): tensor for name, tensor in _own(module).items() if tensor.is_meta}

    model.apply(look)
    for module, own in waiting.items() if param_init_fn is None else ():
        if own and not callable(getattr(module, "reset_parameters", None)):
            raise ConfigError(
                f"a {type(module).__name__} has parameters or buffers on meta, and no reset_parameters()",
                where=names[module] or "(root)",
                instead="fully_shard(param_init_fn=...), or materialize(model, param_init_fn)",
            )
    work = _Work(model, param_init_fn or _reset, names)
    for module, own in waiting.items():
        inner = {place: old for part in module.modules() if part is not module for place, old in waiting[part].items()}
        if own or (inner and param_init_fn is not None):
            work.initialize(module, own, inner)


def _reset(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    held = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def _like(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value


def _on_meta(old: torch.Tensor) -> torch.Tensor:
    return _like(old, torch.empty(old.shape, dtype=old.dtype, device="meta"))


def _get(place: Place) -> torch.Tensor:
    return _own(place[0])[place[1]]


def _put(place: Place, value: torch.Tensor) -> None:
    module, attribute = place
    if attribute in module._parameters:
        module._parameters[attribute] = value  # type: ignore[assignment]
    else:
        module._buffers[attribute] = value


def _is_untouched(now: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    if now is not before:
        return False
    return bool(now.isnan().all()) if now.is_floating_point() else now._version == version


class _Written(TorchDispatchMode):
    """Notes which memory operators write to."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        given |= kwargs or {}
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = tree_leaves(given.get(argument.name))
                self.storages |= {t.untyped_storage()._cdata for t in written if isinstance(t, torch.Tensor)}
        return func(*args, **(kwargs or {}))


class _Work:
    def __init__(self, model: nn.Module, init_fn: InitFn, names: Mapping[nn.Module, str]) -> None:
        self._init_fn = init_fn
        self._names = names
        self._replaced: dict[torch.Tensor, torch.Tensor] = {}  # several modules may register one
        first = next(p for p in model.parameters() if isinstance(p, DTensor))
        self._mesh = first.device_mesh
        self._device = device_of(self._mesh)
        self._sends_to_host = any(is_offloaded(module) for module in model.modules())
        notes = [note_of(module) for module in model.modules()]
        self._replicated = {p for note in notes if isinstance(note, ReplicatedParams) for p in note.params()}

    @torch.no_grad()
    def initialize(
        self, module: nn.Module, own: Mapping[Place, torch.Tensor], inner: Mapping[Place, torch.Tensor]
    ) -> None:
        """Gives a module its tensors in full, runs its initialization, and keeps this rank's part.

        Args:
            module: The module.
            own: Of its tensors those that are on meta.
            inner: Those below it that were on meta, and are initialized by now.
        """
        old = {**own, **(self._written(module, inner) if inner else {})}
        if not old:
            return
        kept = {(module, a): t for a, t in _own(module).items() if (module, a) not in old}
        for place, tensor in kept.items():  # an initialization may write to it, and `to_empty()` replace it
            value = tensor.detach()
            _put(place, _like(tensor, value.full_tensor() if isinstance(value, DTensor) else value.clone()))
        for place, tensor in old.items():
            _put(place, _like(tensor, self._start(tensor)))
        blank = {place: (_get(place), _get(place)._version) for place in own}
        with plain_class(module):
            self._init_fn(module)
        if own and all(_is_untouched(_get(place), *before) for place, before in blank.items()):
            for place, tensor in own.items():  # FSDP1's initializations look for what is on meta
                _put(place, _on_meta(tensor))
            with plain_class(module):
                self._init_fn(module)
        made = {place: _get(place) for place in old}
        for place, value in made.items():
            _put(place, self._finish(".".join(filter(None, (self._names[place[0]], place[1]))), old[place], value))
        for place, tensor in kept.items():
            _put(place, tensor)

    def _written(self, module: nn.Module, inner: Mapping[Place, torch.Tensor]) -> dict[Place, torch.Tensor]:
        """Those of the tensors below a module that its initialization writes to, which is tried without memory."""
        held = {(part, name): tensor for part in module.modules() for name, tensor in _own(part).items()}
        on_meta = {tensor: _on_meta(tensor) for tensor in held.values()}
        for place, tensor in held.items():
            _put(place, on_meta[tensor])
        try:
            with torch.random.fork_rng(), plain_class(module), _Written() as written:
                self._init_fn(module)
        except AttributeError:  # FSDP1 does not call it for modules without tensors of their own
            return {}
        finally:
            now = {place: _own(place[0]).get(place[1]) for place in held}
            for place, tensor in held.items():
                _put(place, tensor)
        return {
            place: old
            for place, old in inner.items()
            if now[place] is not on_meta[held[place]]
            or on_meta[held[place]].untyped_storage()._cdata in written.storages
        }

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
