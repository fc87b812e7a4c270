"""`full_params`: inside of it, modules have plain, full parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.autograd import allow_any_gradient_dtype, is_saved_by_autograd, move_hooks
from fsdp_compile._torch.tensors import local_tensor, make_dtensor
from fsdp_compile.comm import exchange
from fsdp_compile.comm.gather import Receivers, gather_full
from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.flat_layout import local_part
from fsdp_compile.modules import param_views
from fsdp_compile.modules.attributes import attributes_of, follow_replaced, take_changes
from fsdp_compile.modules.classes import original_class, swap_back, swap_to_original_class
from fsdp_compile.runtime import replaced_params
from fsdp_compile.runtime.extended_reads import refuse_extended
from fsdp_compile.runtime.group_state import ParamState
from fsdp_compile.runtime.module_state import params_in, units_below
from fsdp_compile.runtime.units import FSDPParam, FSDPUnit
from fsdp_compile.runtime.unshard import reshard
from fsdp_compile.state.outside_of_steps import check, refuse_inside_a_step


@dataclasses.dataclass(frozen=True)
class FullParamsOptions:
    """The arguments of `full_params`."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool


@dataclasses.dataclass
class FullParam:
    """One parameter inside of `full_params`.

    Attributes:
        plain: The full parameter on this rank; `None` where modules keep the sharded one.
        is_swapped_in: Whether it was gathered; an error may have come first.
        gradient_dtype: Of the gathered gradient; `None` if no rank had one.
        places: Where it is registered; what is not deleted before the block is not deleted inside of it.
        orders: Names of the parameters of the module of each place, in order.
    """

    unit: FSDPUnit
    param: FSDPParam
    options: FullParamsOptions
    plain: nn.Parameter | None = None
    is_swapped_in: bool = False
    gradient_dtype: torch.dtype | None = None
    places: tuple[tuple[nn.Module, str], ...] = ()
    orders: tuple[tuple[str, ...], ...] = ()
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def swap_in(self) -> None:
        """Gathers the parameter and its gradient, and registers them."""
        param = self.param
        self.places = tuple(param.module_refs)
        self.orders = tuple(tuple(module._parameters) for module, _ in self.places)
        self.attributes = attributes_of(param.parameter)
        full = self._gather(param.sharded_view)
        gradient = None
        if self.options.with_grads:
            self.gradient_dtype = self._widest_gradient()
        if self.gradient_dtype is not None:
            gradient = self._gather(self._own_gradient().to(self.gradient_dtype))
        if full is not None:
            self.plain = param_views.swap_in_full(param, full)
            _set_gradient(self.plain, gradient)
        self.is_swapped_in = True

    def swap_out(self) -> ConfigError | None:
        """Registers the sharded parameter again, and writes changes back; returns what cannot be."""
        if not self.is_swapped_in:
            if self.plain is not None:
                param_views.swap_in_sharded(self.param)
            return None
        registered = [module._parameters.get(attribute) for module, attribute in self.places]
        param_views.swap_in_sharded(self.param)
        self._restore_orders()
        held = None if self.plain is None else _last_changed(registered, self.plain)
        problem = self._problem(held, registered)
        has_gradient = held is not None and held.grad is not None
        if self.options.rank0_only and self.options.writeback:
            problem, has_gradient = self._agree(problem, has_gradient=has_gradient)
        if self.options.writeback and problem is None:
            with torch.no_grad():
                self._keep_value(held)
                if self.options.with_grads:
                    self._keep_gradient(held, has_gradient=has_gradient)
            if held is not None and not self.options.rank0_only:
                take_changes(held, self.attributes, self.param.parameter)
        self._mark_replaced()
        return problem

    def _restore_orders(self) -> None:
        for (module, _), order in zip(self.places, self.orders, strict=True):
            held = module._parameters
            if tuple(held) != order:
                for name in [name for name in order if name in held]:
                    # A parameter that was deleted is registered again last: put the others of its module back in order.
                    held[name] = held.pop(name)

    def _gather(self, local: torch.Tensor) -> torch.Tensor | None:
        spec = self.param.spec
        device = torch.device("cpu") if self.options.offload_to_cpu else exchange.wire_device(local, spec)
        full = gather_full(local, spec, Receivers.FIRST if self.options.rank0_only else Receivers.ALL, device)
        split = self.param.tensor_parallel
        return full if full is None or split is None else split.gathered(full)

    def _widest_gradient(self) -> torch.dtype | None:
        """The dtype of the gradient, the widest one if ranks have several; `None` if no rank has a gradient."""
        spec, gradient = self.param.spec, self.param.parameter.grad
        place = torch.tensor(
            [-1 if gradient is None else _FROM_NARROW_TO_WIDE.index(gradient.dtype)],
            device=exchange.wire_device(self.param.sharded_view, self.param.spec),
        )
        if spec.size > 1:
            dist.all_reduce(place, dist.ReduceOp.MAX, group=exchange.group_named(spec.group))
        return None if place.item() < 0 else _FROM_NARROW_TO_WIDE[int(place.item())]

    def _own_gradient(self) -> torch.Tensor:
        """This rank's part of the gradient; zeros if only other ranks have one."""
        gradient = self.param.parameter.grad
        return torch.zeros_like(self.param.sharded_view) if gradient is None else local_tensor(gradient)  # type: ignore[arg-type]

    def _problem(self, held: nn.Parameter | None, registered: Sequence[nn.Parameter | None]) -> ConfigError | None:
        if self.plain is None:
            return None
        name = self.unit.parameter_name(self.param)
        if held is None or any(parameter is None for parameter in registered):
            what, instead = "it was removed from its module", "write into it, in place"
        elif held.shape != self.param.parameter.shape:
            what, instead = f"its shape changed to {tuple(held.shape)}", "fully_shard() a model of the new shape"
        elif self.options.writeback and held.is_meta:
            what, instead = "it was put on the meta device, where it has no value", "full_params(writeback=False)"
        elif any(p is not self.plain and p is not held and not _is_equal(p, held) for p in registered):
            what = "its places, which are tied, got different parameters"
            instead = "the same parameter for all of them, or untie them before fully_shard()"
        elif not self._is_laid_out(held):
            what = "it was split in another way"
            instead = "write into it, in place, or put a DTensor of the same mesh and placements in its place"
        elif held.requires_grad is not self.param.parameter.requires_grad:
            what = f"its requires_grad changed to {held.requires_grad}"
            instead = "parameter.requires_grad_() on the sharded parameters, outside of the context"
        elif self.options.writeback and held.dtype != self.param.parameter.dtype:
            what = f"its dtype changed to {held.dtype}"
            instead = "model.to(dtype) outside of the context; load_state_dict() without assign=True casts values"
        else:
            self._warn_of_lost_gradient(held)
            return None
        return ConfigError(f"{what} inside full_params(), which cannot be kept", where=name, instead=instead)

    def _is_laid_out(self, held: nn.Parameter) -> bool:
        """Whether a parameter is plain; of one that was split before it was sharded, whether it is split that way."""
        split = self.param.tensor_parallel
        if split is None or not isinstance(held, DTensor):
            return split is None and not isinstance(held, DTensor)
        return split.is_of(held)

    def _warn_of_lost_gradient(self, held: nn.Parameter) -> None:
        if held.grad is not None and self.options.writeback and not self.options.with_grads:
            warnings.warn(
                "gradients that were made inside full_params() are dropped: pass with_grads=True to keep this rank's "
                "part of them",
                stacklevel=2,
            )

    def _agree(self, problem: ConfigError | None, *, has_gradient: bool) -> tuple[ConfigError | None, bool]:
        """The result of the first rank, which alone has the full parameter."""
        said = torch.tensor(
            [int(problem is not None), int(has_gradient)],
            device=exchange.wire_device(self.param.sharded_view, self.param.spec),
        )
        exchange.broadcast_from_first(said, self.param.spec)
        if said[0].item() and problem is None:
            problem = ConfigError(
                "the first rank changed it inside full_params() in a way that cannot be kept",
                where=self.unit.parameter_name(self.param),
                instead="see the error of that rank",
            )
        return problem, bool(said[1].item())

    def _keep_value(self, held: nn.Parameter | None) -> None:
        own = self._own_part(held, self.param.sharded_view)
        # Autograd refuses a backward through memory that was written since: do not write what is equal.
        if not torch.equal(exchange.as_bytes(own), exchange.as_bytes(self.param.sharded_view)):
            self.param.sharded_view.copy_(own)

    def _keep_gradient(self, held: nn.Parameter | None, *, has_gradient: bool) -> None:
        parameter = self.param.parameter
        if not has_gradient:
            parameter.grad = None
            return
        gradient = None if held is None else held.grad
        dtype = self.gradient_dtype or self.param.grad_dtype or parameter.dtype
        own = self._own_part(gradient, torch.empty_like(self.param.sharded_view, dtype=dtype))
        if parameter.grad is None:
            _set_gradient(parameter, make_dtensor(own.clone(), self.param.dtensor))
        else:
            local_tensor(parameter.grad).copy_(own)  # type: ignore[arg-type]

    def _own_part(self, full: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """This rank's part of its own full value, or of the first rank's; contiguous, on the device."""
        param, spec = self.param, self.param.spec
        if isinstance(full, DTensor):  # as before it was sharded
            full = local_tensor(full)
        if not self.options.rank0_only:
            assert full is not None
            part = local_part(full.detach(), spec.dim, spec.size, param.rank)
            return part.to(device=like.device, dtype=like.dtype).contiguous()
        own = torch.empty_like(like)
        exchange.take_from_first(own, full, spec)
        return own

    def _mark_replaced(self) -> None:
        """Makes references of users to the full parameter point at the sharded one."""
        if self.plain is None:
            return
        move_hooks(self.plain, self.param.parameter)
        if self.plain.requires_grad and is_saved_by_autograd(self.plain):
            self.plain.register_post_accumulate_grad_hook(_refuse_late_gradient)
        if isinstance(self.plain, DTensor):
            replaced_params.mark_split_replaced(self.plain, self.param)
        else:
            replaced_params.mark_replaced(self.plain, self.param)


_FROM_NARROW_TO_WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of gradients."""


def _set_gradient(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    if gradient is not None and gradient.dtype != parameter.dtype:  # `keep_low_precision_grads`
        allow_any_gradient_dtype(parameter)
    parameter.grad = gradient


def _last_changed(registered: Sequence[nn.Parameter | None], plain: nn.Parameter) -> nn.Parameter | None:
    """What counts of that which is registered at the places of a parameter, as where names are loaded one by one."""
    return next((parameter for parameter in reversed(registered) if parameter is not plain), plain)


def _is_equal(one: nn.Parameter | None, other: nn.Parameter) -> bool:
    if one is None or one.is_meta or isinstance(one, DTensor) or isinstance(other, DTensor):
        return False
    is_alike = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
    # As bytes: NaN is no other value.
    return is_alike and torch.equal(exchange.as_bytes(one.detach()), exchange.as_bytes(other.detach()))


def _refuse_late_gradient(_parameter: torch.Tensor) -> None:
    raise ConfigError(
        "a backward reaches full parameters that are gone",
        where="after full_params()",
        instead="run the backward of a forward that ran inside full_params() in there, too",
    )


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

    What was a DTensor before it was sharded (tensor parallelism) is that DTensor again.

    All ranks enter and leave together, outside of forward and backward. Inside, `named_parameters()`, `state_dict()`,
    in-place writes and the forward of the plain module work as if nothing were sharded (the compiled one is refused).
    Parameters are gathered one after the other, and all of them are in memory at once. Tied ones stay tied: what is put
    at one place is at all of them afterwards. References to them (of an optimizer made inside, say) are replaced by the
    sharded parameters afterwards.

    Args:
        module: The whole model, a compiled one, or a module in it. Without sharded parameters nothing happens.
        recurse: Everything below `module`, or only the parameters of the unit whose root `module` is.
        writeback: Write changes back: each rank shards its own full values, also if the block ends with an exception.
            Otherwise all changes are dropped, in a world of one rank too.
        rank0_only: Only the first rank of the mesh has full parameters. With `writeback` all ranks get their parts of
            its values, not the attributes that it puts on parameters.
        offload_to_cpu: Full parameters are in the memory of the host, moved one after the other.
        with_grads: Full parameters have full gradients. With `writeback` these are written back, too, or dropped if
            they were set to `None`.

    Raises:
        ConfigError: Inside a forward, a backward or another `full_params` of the same unit; if a parameter is on the
            meta device; and when leaving, if a parameter was removed or changed its shape, its dtype or
            `requires_grad`, or places of a tied one got different parameters.
    """
    module = getattr(module, "_orig_mod", module)
    refuse_inside_a_step(
        "full_params()",
        what="parameters cannot be held in full inside a step",
        instead="full_params(model) before or after it; inside a forward, self.weight is the full parameter anyway",
    )
    units = [unit for unit in units_below(module) if recurse or unit.has_root(module)]
    check(units, "full_params()", instead="one full_params() around both blocks")
    refuse_extended(
        (param for unit in units for param in params_in(module, unit)),
        "full_params()",
        instead="torch.distributed.checkpoint, which saves each rank's part; in a forward, self.weight is gathered",
    )
    wish = FullParamsOptions(writeback, rank0_only, offload_to_cpu, with_grads)
    held = _FullParams(units, [FullParam(unit, param, wish) for unit in units for param in params_in(module, unit)])
    try:
        held.swap_in(module)
        yield
    except BaseException:
        held.swap_out()
        raise
    problems = held.swap_out()
    if problems:
        raise problems[0]


@dataclasses.dataclass
class _FullParams:
    """All parameters of one `full_params`.

    Attributes:
        classes: Modules that got their own class back, with their sharded class.
    """

    units: list[FSDPUnit]
    params: list[FullParam]
    classes: list[tuple[nn.Module, type[nn.Module]]] = dataclasses.field(default_factory=list)

    def swap_in(self, module: nn.Module) -> None:
        """Gathers and registers all parameters."""
        for unit in self.units:
            unit.model.note_layout()
            unit.param_state = ParamState.UNSHARDED
        for param in self.params:
            param.swap_in()
        full = {held.param for held in self.params if held.plain is not None}
        below = {param for unit in units_below(module) for param in params_in(module, unit)}
        # Nothing below `module` is sharded any more: forwards are the plain ones.
        if full and below <= full:
            for each in module.modules():
                if original_class(each) is not type(each):
                    self.classes.append((each, swap_to_original_class(each)))

    def swap_out(self) -> list[ConfigError]:
        """Registers the sharded parameters again, and writes changes back; returns what cannot be."""
        for module, sharded_class in self.classes:
            swap_back(module, sharded_class)  # its reads may have changed meanwhile
        problems = [param.swap_out() for param in self.params]
        for param in self.params:
            follow_replaced(param.param.parameter)
        # It may be outdated only on ranks whose own rows were changed, which would gather without the others.
        reshard(self.units)
        for unit in self.units:
            unit.param_state = ParamState.SHARDED
            unit.model.note_layout()
        return [problem for problem in problems if problem is not None]
