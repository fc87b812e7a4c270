"""Full values of a sharded model: `full_params` puts them into its modules, `full_tensors` yields them one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_compile._torch.fully_shard_calls import without_fsdp2_hooks
from fsdp_compile._torch.fully_shard_params import unsharded_spec
from fsdp_compile._torch.tensors import local_tensor, make_dtensor, set_local_tensor
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.shards import (
    full_value,
    is_first,
    meshes_of,
    own_part,
    plain_name,
    require_alike,
    shard_between_steps,
    torch_params,
    union,
    unwrap,
)

_INSIDE = "_fsdp_is_in_full_params"
"""Attribute of what is registered in the place of a sharded parameter, and of that one."""


@contextlib.contextmanager
def full_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Unshards parameters outside of a step: modules have plain, full parameters, in the dtype that is stored.

    All ranks enter and leave together, outside of forward and backward. Inside, `named_parameters()`, `state_dict()`,
    `load_state_dict()`, in-place writes and forwards of the plain module work as if nothing were sharded: FSDP2's hooks
    are off. Parameters are gathered one after the other, and all of them are in memory at once. Tied ones stay tied:
    what is put at one place is at all of them afterwards. A parameter that was taken inside is empty afterwards: make
    optimizers outside. With tensor parallelism they are DTensors over its mesh, but plain and full with `rank0_only` or
    `offload_to_cpu`.

    Args:
        module: The whole model, a compiled one, or a module in it. Without sharded parameters nothing happens.
        recurse: Everything below `module`, or only what is below no further module that FSDP2 was applied to.
        writeback: Write changes back: each rank shards its own full values, also if the block ends with an exception.
            Otherwise all changes are dropped.
        rank0_only: Only the first rank of the mesh has full parameters. With `writeback` all ranks get their parts of
            its values, not the attributes that it puts on parameters.
        offload_to_cpu: Full parameters are in the memory of the host, moved one after the other.
        with_grads: Full parameters have full gradients. With `writeback` these are written back, too, or dropped if
            they were set to `None`.

    Raises:
        ConfigError: Inside a forward, a backward or another `full_params` of the same parameters; if a parameter is on
            the meta device; and when leaving, on all ranks, if on one of them a parameter was removed or changed its
            shape, its dtype or `requires_grad`, or places of a tied one got different parameters.
        RankMismatchError: On all ranks, if a parameter was replaced before, and not by the same kind on all of them.
    """
    module = unwrap(module)
    shard_between_steps(
        module,
        "full_params()",
        instead="full_params(model) before or after it; inside a forward, self.weight is the full parameter anyway",
    )
    options = _Options(writeback, offload_to_cpu, with_grads, source=0 if rank0_only else None)
    units = tuple(f"{name}." for name, part in module.named_modules() if name and isinstance(part, FSDPModule))
    skipped = () if recurse else units
    parts = {name: part for name, part in module.named_modules() if not f"{name}.".startswith(skipped)}
    found = _places(parts)
    require_alike(parts, "full_params()")
    stays_split = not (rank0_only or offload_to_cpu)
    layouts = {p: unsharded_spec(t) for p, (t, _) in torch_params(found).items()} if stays_split else {}
    params = [_FullParam(name, p, places, layouts.get(p)) for p, (name, places) in found.items()]
    problems: list[ConfigError] = []
    with without_fsdp2_hooks(module):
        try:
            _swap_in(params, options)
            yield
        finally:
            problems = _swap_out(params, options)
    if problems:
        raise problems[0]


def full_tensors(
    model: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name and the full value of each tensor of `model.state_dict()`, in its order.

    A parameter is gathered when it is its turn: a rank has its shards and one full value. (A loop's variable keeps a
    value until it has the next: `del` it where two do not fit.) All ranks iterate to the end, between steps, and change
    nothing meanwhile.

    Names are the plain model's, with and without `torch.compile`. A parameter with several names is yielded under each.
    What is not sharded, as buffers, is this rank's own memory, detached. Entries that are no tensors are left out.

    Args:
        model: A sharded or compiled model, or a module in it.
        rank0_only: Only the first rank of the mesh gets values. On others the loop has no iterations; they take part
            in it all the same.
        cpu_offload: Values are in the memory of the host.

    Raises:
        ConfigError: When it is called, inside a forward or a backward; with `rank0_only`, if parameters are sharded
            over meshes whose first ranks differ.
        RankMismatchError: On all ranks, if a parameter was replaced, and not by the same kind on all of them.
    """
    module, where = unwrap(model), "full_tensors()"
    shard_between_steps(module, where, instead=f"{where} before or after it")
    receives = not rank0_only or is_first(module.parameters(), where)
    require_alike(dict(module.named_modules()), where)

    def full(value: torch.Tensor) -> torch.Tensor:
        whole = full_value(value) if isinstance(value, DTensor) else value.detach()
        return whole.cpu() if cpu_offload else whole

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in module.state_dict().items():
            # No variable refers to the full value, so that it is gone when the next one is gathered.
            if receives and isinstance(value, torch.Tensor):
                yield plain_name(name), full(value)
            elif isinstance(value, DTensor):
                full_value(value)

    return values()


@dataclasses.dataclass(frozen=True)
class _Options:
    """The arguments of `full_params`; `source` is the rank that alone has full parameters, if there is one."""

    writeback: bool
    offload_to_cpu: bool
    with_grads: bool
    source: int | None


Places = list[tuple[nn.Module, str]]


def _places(parts: Mapping[str, nn.Module]) -> dict[DTensor, tuple[str, Places]]:
    """The sharded parameters of some modules, with a name and every place of each."""
    found: dict[DTensor, tuple[str, Places]] = {}
    for prefix, part in parts.items():
        for attribute, parameter in part._parameters.items():
            if parameter is None:
                continue
            name = plain_name(f"{prefix}.{attribute}".removeprefix("."))
            if hasattr(parameter, _INSIDE):
                raise ConfigError(
                    "it is full already", where=f"full_params(), {name}", instead="one full_params() around both blocks"
                )
            if isinstance(parameter, DTensor):
                if parameter.is_meta:
                    raise ConfigError("it is on the meta device", where=f"full_params(), {name}", instead="its values")
                found.setdefault(parameter, (name, []))[1].append((part, attribute))
    return found


@dataclasses.dataclass
class _FullParam:
    """One parameter inside of `full_params`.

    Attributes:
        layout: What it is inside, if that is a DTensor over further ranks (tensor parallel).
        plain: The full parameter on this rank; `None` where modules keep the sharded one.
        has_gradient: Whether some rank had one at first.
        is_swapped_in: Whether it was gathered; an error may have come first.
    """

    name: str
    sharded: DTensor
    places: Places
    layout: Any = None
    plain: nn.Parameter | None = None
    has_gradient: bool = False
    is_swapped_in: bool = False
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def swap_in(self, options: _Options, *, receives: bool) -> None:
        """Gathers the parameter and its gradient, and registers them."""
        gradient = None
        if self.has_gradient:
            own = self.sharded.grad
            if not isinstance(own, DTensor):  # other ranks alone have one
                own = make_dtensor(torch.zeros_like(local_tensor(self.sharded)), self.sharded)
            gradient = self._gathered(own, options)
        full = self._gathered(self.sharded, options)
        self.attributes = dict(vars(self.sharded))
        setattr(self.sharded, _INSIDE, True)
        self.is_swapped_in = True
        if receives:
            self.plain = nn.Parameter(full, requires_grad=self.sharded.requires_grad)
            vars(self.plain).update(self.attributes)
            setattr(self.plain, _INSIDE, True)
            self.plain.grad = gradient
            for module, attribute in self.places:
                module._parameters[attribute] = self.plain

    def _gathered(self, value: DTensor, options: _Options) -> torch.Tensor:
        full = full_value(value)
        if self.layout is not None:
            return distribute_tensor(full, self.layout.mesh, self.layout.placements, src_data_rank=None)
        return full.cpu() if options.offload_to_cpu else full

    def take_out(self) -> tuple[nn.Parameter | None, str | None]:
        """Registers the sharded parameter again; returns what was in its place, and why that cannot be kept."""
        if not self.is_swapped_in:
            return None, None
        delattr(self.sharded, _INSIDE)
        registered = [module._parameters.get(attribute) for module, attribute in self.places]
        for module, attribute in self.places:
            module._parameters[attribute] = self.sharded  # type: ignore[assignment]
        if self.plain is None:
            return None, None
        # What counts is the last change, as where names are loaded one by one.
        held = next((parameter for parameter in reversed(registered) if parameter is not self.plain), self.plain)
        return held, self._problem(held, registered)

    def _problem(self, held: nn.Parameter | None, registered: list[nn.Parameter | None]) -> str | None:
        like = self.sharded
        if held is None or any(parameter is None for parameter in registered):
            return "was removed from its module: write into it, in place"
        if isinstance(held, DTensor) and (self.layout is None or held is like):
            return "was sharded again by the forward of a module outside: run forwards of the module that was given"
        for name in ("shape", "dtype", "is_meta", "requires_grad"):
            inside, before = getattr(held, name), getattr(like, name)
            if inside != before:
                return f"has another {name}, {inside} in the place of {before}: change that outside"
        if any(other is not self.plain and other is not held and not _is_equal(other, held) for other in registered):
            return "is tied, and its places got different parameters: the same one for all of them"
        return None

    @torch.no_grad()
    def write_back(self, held: nn.Parameter | None, options: _Options, *, has_gradient: bool) -> None:
        """Keeps this rank's part of what was in place of the sharded parameter, and of its gradient."""
        mine = local_tensor(self.sharded)
        part = self._own_part(held, mine.dtype, options)
        # Autograd refuses a backward through memory that was written since: do not write what is equal.
        if not torch.equal(_as_bytes(part), _as_bytes(mine)):
            mine.copy_(part)
        if held is not None and options.source is None:
            kept = {key: value for key, value in vars(held).items() if key != _INSIDE}
            changed = {key for key in {*self.attributes, *kept} if self.attributes.get(key) is not kept.get(key)}
            for key in changed:
                vars(self.sharded).pop(key, None)
            vars(self.sharded).update({key: kept[key] for key in changed if key in kept})
        if options.with_grads:
            gradient = (
                self._own_part(None if held is None else held.grad, mine.dtype, options) if has_gradient else None
            )
            self.sharded.grad = None if gradient is None else make_dtensor(gradient, self.sharded)

    def _own_part(self, full: torch.Tensor | None, dtype: torch.dtype, options: _Options) -> torch.Tensor:
        given = torch.zeros(self.sharded.shape, dtype=dtype) if full is None else full.detach()
        if isinstance(given, DTensor):
            given = full_value(given)
        return own_part(given, self.sharded, source=options.source)

    def free(self) -> None:
        """Frees the full parameter, so that it cannot be taken for the sharded one; what views it has keep theirs."""
        if self.plain is not None:
            self.plain.grad = None
            if isinstance(self.plain, DTensor):
                set_local_tensor(self.plain, local_tensor(self.plain).new_empty(0))
            else:
                self.plain.data = self.plain.data.new_empty(0)


def _swap_in(params: list[_FullParam], options: _Options) -> None:
    """Gathers and registers all parameters."""
    sharded = [param.sharded for param in params]
    receives = options.source is None or is_first(sharded, "full_params(rank0_only=True)", sends=options.writeback)
    if options.with_grads:
        has = union({param.name: True for param in params if param.sharded.grad is not None}, meshes_of(sharded))
        for param in params:
            param.has_gradient = param.name in has
    for param in params:
        param.swap_in(options, receives=receives)


def _swap_out(params: list[_FullParam], options: _Options) -> list[ConfigError]:
    """Registers the sharded parameters again, and writes changes back; returns what cannot be."""
    taken = [param.take_out() for param in params]
    wrong = {param.name: problem for param, (_, problem) in zip(params, taken, strict=True) if problem is not None}
    if options.writeback and all(param.is_swapped_in for param in params):
        wrong = _write_back(params, [held for held, _ in taken], wrong, options)
    elif options.source is not None:
        wrong = {}
    for param in params:
        param.free()
    return [
        ConfigError(f"it {wrong[param.name]}", where=f"inside of full_params(), {param.name}")
        for param in params
        if param.name in wrong
    ]


def _write_back(
    params: list[_FullParam], taken: list[nn.Parameter | None], wrong: dict[str, str], options: _Options
) -> dict[str, str]:
    """Writes those with which nothing is wrong on any rank; returns what is, by name, that of this rank first."""
    gradients = {
        p.name: True for p, held in zip(params, taken, strict=True) if held is not None and held.grad is not None
    }
    if gradients and not options.with_grads:
        warnings.warn("gradients of full parameters are dropped: with_grads=True keeps them", stacklevel=6)
    meshes = meshes_of(param.sharded for param in params)
    elsewhere = union(wrong, meshes)
    has = union(gradients, meshes) if options.with_grads else {}
    for param, held in zip(params, taken, strict=True):
        if param.name not in elsewhere:
            param.write_back(held, options, has_gradient=param.name in has)
    return {name: f"{problem} (on another rank)" for name, problem in elsewhere.items()} | wrong


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _is_equal(one: nn.Parameter | None, other: nn.Parameter) -> bool:
    if one is None or one.is_meta or isinstance(one, DTensor):
        return False
    is_same_kind = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
    return is_same_kind and torch.equal(_as_bytes(one), _as_bytes(other))  # as bytes: NaN is no other value
