"""`materialize`: initializes a sharded model on the meta device, one module at a time.

Memory that is to be initialized is filled with marks, so that elements which an initialization left out are found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Set
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile.comm import exchange
from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.flat_layout import local_part
from fsdp_compile.modules import param_views
from fsdp_compile.modules.buffers import restored_buffers
from fsdp_compile.modules.classes import original_class, swap_back, swap_to_original_class
from fsdp_compile.runtime.extended_reads import refuse_extended
from fsdp_compile.runtime.split_params import refuse_split
from fsdp_compile.runtime.units import FSDPParam, FSDPUnit
from fsdp_compile.sharding import checks
from fsdp_compile.sharding.arguments import InitFn, InitFrom
from fsdp_compile.sharding.blanks import Blanks, address
from fsdp_compile.sharding.devices import device_on
from fsdp_compile.sharding.init_mode import InitMode
from fsdp_compile.sharding.views import allocate_from_meta


def materialize(
    model: nn.Module, device: torch.device | str | int | None = None, param_init_fn: InitFn | None = None
) -> None:
    """Initializes what is on the meta device in a sharded model; no rank ever has the full model in memory.

    One after the other, each module that has parameters or buffers on meta gets them in full on `device`, is
    initialized under `no_grad`, and every rank copies its part. With one seed on all ranks the values are, bit for bit,
    those of an unsharded model on the same device after

        for module in model.modules():
            module.reset_parameters()  # where it has parameters or buffers of its own

    or after `model.apply(param_init_fn)`, in which modules come after those in them; each once, also if it has several
    places. A tied parameter is initialized by each module that registers it, so the last one wins, as there.

    Args:
        model: After `fully_shard`. What is not on meta keeps its values and its device, whatever initializations write
            there. Modules that have all of their values are left alone, and so are those in which all have.
        device: Where to; by default the current device of the mesh's type.
        param_init_fn: Called on each of the other modules, those without parameters included. It finds the module's own
            parameters and buffers with memory, or, if it does nothing then, its parameters on meta, for `to_empty()`.
            Parameters of other modules it may write whole, in place. By default, modules' `reset_parameters()`.

    Raises:
        ConfigError: If nothing is sharded; a module cannot initialize itself; `param_init_fn` is not callable, left a
            parameter or buffer on meta or without a value, changed its shape, or used views of another module's
            parameters.
        RankMismatchError: If random numbers were drawn and ranks started with different seeds.
    """
    model = getattr(model, "_orig_mod", model)
    with restored_buffers(model):
        fill_in(model, device, param_init_fn, InitFrom.EACH_RANK)


def fill_in(
    model: nn.Module,
    device: torch.device | str | int | None,
    param_init_fn: InitFn | None,
    source: InitFrom,
    earlier: Mapping[nn.Module, Set[str]] = MappingProxyType({}),
) -> dict[nn.Module, Set[str]]:
    """`materialize`, with values of each rank's own initialization, or of the first rank's; buffers in own dtypes.

    Args:
        model: As for `materialize`.
        device: The same.
        param_init_fn: The same.
        source: Whose values count.
        earlier: What this function returned for parts of the model, in a bottom-up series of calls. Modules around
            those parts may write these values once more, and no module is initialized twice.

    Returns:
        The modules that were initialized, each with the attributes of it that had no value.
    """
    from fsdp_compile.runtime.module_state import units

    checks.check_init_fn(param_init_fn)
    sharded = units(model)
    if not sharded:
        raise ConfigError(
            "nothing in this model is sharded",
            where=f"materialize({original_class(model).__name__})",
            instead="fully_shard(model) first; a model that needs no sharding is materialized by "
            "model.to_empty(device=...) and its own initialization",
        )
    refuse_split(
        sharded,
        "materialize()",
        instead="model.to_empty(device=...) and the model's own initialization, whose DTensors draw random numbers for "
        "themselves; or a checkpoint",
    )
    refuse_extended(
        (param for unit in sharded for param in unit.params),
        "materialize()",
        instead="model.to_empty(device=...) and the model's own initialization; or a checkpoint",
    )
    names = {module: name for name, module in model.named_modules()}
    waiting = [module for module in names if any(t.is_meta for t in _own(module).values())]
    if not waiting:
        return {}
    for module in waiting if param_init_fn is None else ():
        if not callable(getattr(module, "reset_parameters", None)):
            raise _no_initialization(names[module], module)
    target = device_on(sharded[0].policy.mesh, device, where="materialize(device=...)")
    spec = next(sharded[0].params).spec
    before = exchange.fingerprint(target)
    missing = {m: {a for a, t in _own(m).items() if t.is_meta} for m in waiting}
    unwritten = {_own(module)[attribute] for module, attributes in missing.items() for attribute in attributes}
    writable = unwritten | {t for m, attributes in earlier.items() for a, t in _own(m).items() if a in attributes}
    order = names if param_init_fn is None else _inner_first(model)
    called = [m for m in order if m in missing or (param_init_fn and m not in earlier and _is_around(m, writable))]
    valued = {address(tensor) for module in names for tensor in _own(module).values() if tensor not in writable}
    for unit in sharded:
        _give_blanks(unit, target)
    params = [param for unit in sharded for param in unit.params]
    work = _Work(param_init_fn, target, source, params, unwritten, writable, valued - {0})
    for module in called:
        work.initialize(module, names[module] or original_class(module).__name__)
    work.refuse_incomplete()
    if source is InitFrom.EACH_RANK:
        exchange.check_alike(before, exchange.fingerprint(target), spec, target)
    else:
        for value in work.replaced.values():
            exchange.broadcast_from_first(value.detach(), spec)
    return {module: missing.get(module, set()) for module in called}


def _is_around(module: nn.Module, writable: Set[torch.Tensor]) -> bool:
    """Whether a module has nothing of its own, and is around what may be written, or around nothing at all."""
    inside = [tensor for part in module.modules() for tensor in _own(part).values()]
    return not _own(module) and (not inside or any(tensor in writable for tensor in inside))


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    """Modules in the order of `module.apply`, each once."""
    seen: set[nn.Module] = set()
    todo = [(module, False)]
    while todo:
        part, is_left = todo.pop()
        if is_left:
            yield part
        elif part not in seen:
            seen.add(part)
            todo.append((part, True))
            todo.extend((child, False) for child in reversed(list(part.children())))


def _give_blanks(unit: FSDPUnit, device: torch.device) -> None:
    """Gives the parameters of a unit that are on meta memory full of marks."""
    waiting = [param for param in unit.params if param.parameter.is_meta]
    found = {param.parameter for param in waiting}
    allocate_from_meta(unit, waiting, device)
    for param in unit.params:
        if param.parameter in found:
            Blanks().add(param.sharded_view)


@dataclasses.dataclass
class _Work:
    """The state of one call of `materialize`.

    Attributes:
        params: The sharded parameters of the model.
        unwritten: Parameters and buffers that have no value yet.
        writable: Those that had none when the call began; all others keep what they have.
        valued: Addresses of the memory of the plain ones among those others.
        replaced: New tensors for those on meta that are not sharded; several modules may register one.
        incomplete: Those of which elements have no value after their module was initialized, with their names.
    """

    init_fn: InitFn | None
    device: torch.device
    source: InitFrom
    params: list[FSDPParam]
    unwritten: set[torch.Tensor]
    writable: set[torch.Tensor]
    valued: set[int]
    replaced: dict[torch.Tensor, torch.Tensor] = dataclasses.field(default_factory=dict)
    incomplete: dict[torch.Tensor, str] = dataclasses.field(default_factory=dict)
    blanks: Blanks = dataclasses.field(default_factory=Blanks)

    def initialize(self, module: nn.Module, name: str) -> None:
        """Initializes a module's full parameters, and copies this rank's part."""
        params = dict(param_views.own_params(module))
        valued = set(self.valued)
        for param in params.values():
            full = param_views.swap_in_full(param, self._start(param))
            if param.parameter not in self.writable:
                valued.add(address(full))
        kept = _Unsharded(module, [a for a, t in _own(module).items() if a not in params and t not in self.writable])
        self._replace_unsharded(module, params)
        sharded_class = swap_to_original_class(module)
        shapes = {attribute: (t.shape, t.dtype) for attribute, t in _own(module).items()}
        try:
            was_used = self._call(module, name, valued)
            if not was_used and any(param.parameter in self.unwritten for param in params.values()):
                self._call_on_meta(module, name, params, valued)
            kept.put_back()
            for attribute, expected in shapes.items():
                _check(f"{name}.{attribute}", _own(module).get(attribute), expected)
            for attribute, param in params.items():
                if param.parameter in self.writable:
                    self.incomplete[param.parameter] = f"{name}.{attribute}"
                    self._keep(param, module._parameters[attribute])
            known = params.keys() | kept.held.keys()
            self.incomplete.update({t: f"{name}.{a}" for a, t in _own(module).items() if a not in known})
        finally:
            swap_back(module, sharded_class)
            for param in params.values():
                param_views.swap_in_sharded(param)

    def _call(self, module: nn.Module, name: str, valued: Set[int]) -> bool:
        """Runs the initialization of a module; returns whether it did anything."""
        mode = InitMode(name, self.params, self._keep, valued, self.blanks)
        with torch.no_grad(), mode:
            (self.init_fn or _reset)(module)
        return mode.was_used

    def _call_on_meta(self, module: nn.Module, name: str, params: dict[str, FSDPParam], valued: Set[int]) -> None:
        """Runs an initialization again that did nothing, with parameters on meta: FSDP1's materialize these alone."""
        blanks = {attribute: module._parameters[attribute] for attribute in params}
        for attribute, param in params.items():
            if param.parameter in self.unwritten:
                empty = torch.empty(param.spec.shape, dtype=param.parameter.dtype, device="meta")
                module._parameters[attribute] = nn.Parameter(empty, requires_grad=param.parameter.requires_grad)
        if not self._call(module, name, valued):
            module._parameters.update(blanks)

    def refuse_incomplete(self) -> None:
        """Raises `ConfigError` if a tensor has elements that no initialization wrote."""
        for tensor, name in self.incomplete.items():
            if isinstance(tensor, DTensor) or self.blanks.have(tensor):
                raise ConfigError(
                    "an initialization left elements of it without a value (or made them NaN)",
                    where=name,
                    instead="a param_init_fn that writes all of it",
                )

    def _start(self, param: FSDPParam) -> torch.Tensor:
        """What an initialization finds: blank memory, or the value that another module gave a tied parameter."""
        if param.parameter in self.unwritten:
            return self.blanks.make(param.parameter, self.device)
        return exchange.gather(param.sharded_view, param.spec)

    def _replace_unsharded(self, module: nn.Module, params: dict[str, FSDPParam]) -> None:
        for holder in (module._parameters, module._buffers):
            for attribute, old in holder.items():
                if old is None or attribute in params or not (old.is_meta or old in self.replaced):
                    continue
                if old not in self.replaced:
                    self.replaced[old] = self._unsharded(old)
                    self.writable.add(self.replaced[old])
                holder[attribute] = self.replaced[old]  # type: ignore[assignment]

    def _unsharded(self, old: torch.Tensor) -> torch.Tensor:
        value = self.blanks.make(old, self.device)
        return nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value

    @torch.no_grad()
    def _keep(self, param: FSDPParam, made: torch.Tensor | None) -> None:
        """Keeps this rank's part of a full value, or of the first rank's, unless there was a value before."""
        assert made is not None
        if param.parameter not in self.writable:
            return
        if self.source is InitFrom.EACH_RANK:
            param.sharded_view.copy_(local_part(made, param.spec.dim, param.spec.size, param.rank))
        else:
            exchange.take_from_first(param.sharded_view, made, param.spec)
        if not self.blanks.have(made):  # else a module above it may write the rest
            self.unwritten.discard(param.parameter)
            self.incomplete.pop(param.parameter, None)


class _Unsharded:
    """Tensors that a module is to keep, under some of its attributes, whatever its initialization does."""

    def __init__(self, module: nn.Module, attributes: Iterable[str]) -> None:
        own = _own(module)
        self._module = module
        # With the memory: `to_empty()` gives new memory to the same parameter.
        self.held = {attribute: (own[attribute], own[attribute].detach()) for attribute in attributes}

    def put_back(self) -> None:
        """Registers them again, with the memory that they had."""
        for attribute, (tensor, value) in self.held.items():
            holder = self._module._parameters if attribute in self._module._parameters else self._module._buffers
            holder[attribute] = tensor  # type: ignore[assignment]
            if address(tensor) != address(value):
                tensor.data = value


def _reset(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that a module itself registers."""
    found = {**module._parameters, **module._buffers}
    return {attribute: tensor for attribute, tensor in found.items() if tensor is not None}


def _check(name: str, value: torch.Tensor | None, expected: tuple[torch.Size, torch.dtype]) -> None:
    shape, dtype = expected
    if value is None:
        raise ConfigError("an initialization removed it", where=name, instead="give it values in place")
    if value.is_meta:
        raise ConfigError(
            "an initialization left it on the meta device",
            where=name,
            instead="make new tensors on the device of those that the module holds, or write into them",
        )
    if value.shape != shape or value.dtype != dtype:
        raise ConfigError(
            f"an initialization changed it from {dtype} of shape {tuple(shape)} to {value.dtype} of shape "
            f"{tuple(value.shape)}",
            where=name,
            instead="decide shapes and dtypes when the model is made: they are laid out already",
        )


def _no_initialization(name: str, module: nn.Module) -> ConfigError:
    held = ", ".join(_own(module))
    return ConfigError(
        f"this {original_class(module).__name__} holds {held} and has no reset_parameters()",
        where=name or "the outermost module",
        instead="write reset_parameters(self), or pass param_init_fn=f with f(module) that initializes each kind of "
        "module (a transformers model brings one: param_init_fn=model._init_weights)",
    )
