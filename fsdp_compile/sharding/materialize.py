"""`materialize`: initializes a sharded model on the meta device, one module at a time.

Memory that is to be initialized is filled with marks, so that elements which an initialization left out are found.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import TorchDispatchMode, tree_leaves
from fsdp_compile.comm import exchange
from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.flat_layout import local_part
from fsdp_compile.modules import param_views
from fsdp_compile.modules.classes import original_class, swap_back, swap_to_original_class
from fsdp_compile.runtime.units import FSDPParam
from fsdp_compile.sharding import checks
from fsdp_compile.sharding.arguments import InitFn, InitFrom
from fsdp_compile.sharding.devices import device_on
from fsdp_compile.sharding.views import allocate_from_meta

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def blank(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like `like` on `device`, full of marks; zeros in dtypes that have no value to spare."""
    value = torch.zeros(like.shape, dtype=like.dtype, device=device)
    mark = _mark(like.dtype)
    return value if mark is None else value.fill_(mark)


def has_marks(value: torch.Tensor) -> bool:
    """Whether an element was never written."""
    mark = _mark(value.dtype)
    if mark is None or value.numel() == 0:
        return False
    marked = value != value if mark != mark else value == mark  # noqa: PLR0124  NaN is not equal to itself
    return bool(marked.any())


def _mark(dtype: torch.dtype) -> float | int | None:
    if dtype in _INTEGERS:
        return torch.iinfo(dtype).min
    narrow = dtype.is_floating_point and dtype.itemsize < 2  # float8 formats: not all have NaN, few have operators
    return float("nan") if (dtype.is_floating_point and not narrow) or dtype.is_complex else None


def materialize(
    model: nn.Module, device: torch.device | str | int | None = None, param_init_fn: InitFn | None = None
) -> None:
    """Initializes what is on the meta device in a sharded model; no rank ever has the full model in memory.

    In the order of `model.modules()`, each module that has parameters or buffers on meta gets them in full on `device`,
    is initialized under `no_grad`, and every rank copies its part. With one seed on all ranks the values are, bit for
    bit, those of an unsharded model on the same device after

        for module in model.modules():
            param_init_fn(module)  # or module.reset_parameters(), where it has parameters or buffers of its own

    A tied parameter is initialized by each module that registers it, so the last one wins, as there.

    Args:
        model: After `fully_shard`. What is not on meta keeps its values and its device, and its modules are left alone.
        device: Where to; by default the current device of the mesh's type.
        param_init_fn: Called on each module, those without parameters included. It may only use the module's own
            parameters and buffers. By default, modules' `reset_parameters()`.

    Raises:
        ConfigError: If nothing is sharded; a module cannot initialize itself; `param_init_fn` is not callable, left a
            parameter or buffer on meta or without a value, changed its shape, or used another module's parameters.
        RankMismatchError: If random numbers were drawn and ranks started with different seeds.
    """
    fill_in(getattr(model, "_orig_mod", model), device, param_init_fn, InitFrom.EACH_RANK)


def fill_in(
    model: nn.Module, device: torch.device | str | int | None, param_init_fn: InitFn | None, source: InitFrom
) -> None:
    """`materialize`, with values of each rank's own initialization, or of the first rank's."""
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
    names = {module: name for name, module in model.named_modules()}
    waiting = [module for module in names if any(t.is_meta for t in _own(module).values())]
    if not waiting:
        return
    for module in waiting if param_init_fn is None else ():
        if not callable(getattr(module, "reset_parameters", None)):
            raise _no_initialization(names[module], module)
    target = device_on(sharded[0].policy.mesh, device, where="materialize(device=...)")
    spec = next(sharded[0].params).spec
    before = exchange.fingerprint(target)
    work = _Work(param_init_fn, target, source, unwritten={t for m in waiting for t in _own(m).values() if t.is_meta})
    for unit in sharded:
        allocate_from_meta(unit, [param for param in unit.params if param.parameter.is_meta], target)
    for module, name in names.items():
        has_state = bool(_own(module))
        if module in waiting or (param_init_fn is not None and not has_state):
            work.initialize(module, name or original_class(module).__name__)
    if source is InitFrom.EACH_RANK:
        exchange.check_alike(before, exchange.fingerprint(target), spec, target)
    else:
        for value in work.replaced.values():
            exchange.broadcast_from_first(value.detach(), spec)


@dataclasses.dataclass
class _Work:
    """The state of one call of `materialize`.

    Attributes:
        unwritten: Parameters and buffers that have no value yet.
        replaced: New tensors for those on meta that are not sharded; several modules may register one.
    """

    init_fn: InitFn | None
    device: torch.device
    source: InitFrom
    unwritten: set[torch.Tensor]
    replaced: dict[torch.Tensor, torch.Tensor] = dataclasses.field(default_factory=dict)

    def initialize(self, module: nn.Module, name: str) -> None:
        """Initializes a module's full parameters, and copies this rank's part."""
        params = dict(param_views.own_params(module))
        for param in params.values():
            param_views.swap_in_full(param, self._start(param))
        self._replace_unsharded(module, params)
        sharded_class = swap_to_original_class(module)
        shapes = {attribute: (t.shape, t.dtype) for attribute, t in _own(module).items()}
        try:
            with torch.no_grad(), _OwnStateOnly(name):
                (self.init_fn or _reset)(module)
            for attribute, expected in shapes.items():
                _check(f"{name}.{attribute}", _own(module).get(attribute), expected)
            with torch.no_grad():
                for param in params.values():
                    self._keep(param)
            self.unwritten.difference_update(param.parameter for param in params.values())
        finally:
            swap_back(module, sharded_class)
            for param in params.values():
                param_views.swap_in_sharded(param)

    def _start(self, param: FSDPParam) -> torch.Tensor:
        """What an initialization finds: blank memory, or the value that another module gave a tied parameter."""
        if param.parameter in self.unwritten:
            return blank(param.parameter, self.device)
        return exchange.gather(param.sharded_view, param.spec)

    def _replace_unsharded(self, module: nn.Module, params: dict[str, FSDPParam]) -> None:
        for holder in (module._parameters, module._buffers):
            for attribute, old in holder.items():
                if old is None or attribute in params or not (old.is_meta or old in self.replaced):
                    continue
                if old not in self.replaced:
                    self.replaced[old] = self._unsharded(old)
                holder[attribute] = self.replaced[old]  # type: ignore[assignment]

    def _unsharded(self, old: torch.Tensor) -> torch.Tensor:
        value = blank(old, self.device)
        return nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value

    def _keep(self, param: FSDPParam) -> None:
        made = param_views.swapped_in(param)
        assert made is not None
        if self.source is InitFrom.EACH_RANK:
            param.sharded_view.copy_(local_part(made, param.spec.dim, param.spec.size, param.rank))
            return
        exchange.take_from_first(param.sharded_view, made, param.spec)


class _OwnStateOnly(TorchDispatchMode):
    """Refuses operators on parameters of other modules, which are sharded or have no memory."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and (value.is_meta or isinstance(value, DTensor)):
                raise ConfigError(
                    f"the initialization of this module uses a parameter or buffer of another one, in {func}",
                    where=self._name,
                    instead="initialize in each module what the module itself holds: param_init_fn is called on all of "
                    "them",
                )
        return func(*args, **(kwargs or {}))


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
    if has_marks(value):
        raise ConfigError(
            "an initialization left elements of it without a value (or made them NaN)",
            where=name,
            instead="a param_init_fn that writes all of it",
        )


def _no_initialization(name: str, module: nn.Module) -> ConfigError:
    held = ", ".join(_own(module))
    return ConfigError(
        f"this {original_class(module).__name__} holds {held} and has no reset_parameters()",
        where=name or "the outermost module",
        instead="write reset_parameters(self), or pass param_init_fn=f with f(module) that initializes each kind of "
        "module (a transformers model brings one: param_init_fn=model._init_weights)",
    )
