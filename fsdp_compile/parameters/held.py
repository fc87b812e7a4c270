"""One parameter inside of `full_params`: gathered, shown in its modules, and given back."""

from __future__ import annotations

import dataclasses
import warnings

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import _torch
from fsdp_compile.errors import ConfigError
from fsdp_compile.parameters import exchange, moved, plain_view
from fsdp_compile.parameters.flat import ParameterSlot
from fsdp_compile.parameters.rows import local_part
from fsdp_compile.parameters.unit import Unit


@dataclasses.dataclass(frozen=True)
class Wish:
    """What `full_params` was asked for; its docstring says what each argument means."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool


@dataclasses.dataclass
class HeldSlot:
    """One parameter of a `full_params`.

    Attributes:
        unit: Its unit.
        slot: Its slot.
        wish: The arguments of `full_params`.
        plain: What this rank's modules hold in its place; `None` where they hold the shard.
        taken: Whether it was gathered; an error may have come first.
        orders: Names of the parameters of each module that holds it, in order.
    """

    unit: Unit
    slot: ParameterSlot
    wish: Wish
    plain: nn.Parameter | None = None
    taken: bool = False
    orders: list[tuple[str, ...]] = dataclasses.field(default_factory=list)

    def take(self) -> None:
        """Gathers the parameter and its gradient, and shows them."""
        slot = self.slot
        self.orders = [tuple(module._parameters) for module, _ in slot.owners]
        full = self._gather(slot.local)
        gradient = None
        if self.wish.with_grads and self._some_rank_has_a_gradient():
            gradient = self._gather(self._own_gradient())
        if full is not None:
            self.plain = plain_view.show(slot, full)
            self.plain.grad = gradient
        self.taken = True

    def give_back(self) -> ConfigError | None:
        """Shows the shard again, with what was written if that is to be kept."""
        if not self.taken:
            return None
        held = plain_view.shown(self.slot) if self.plain is not None else None
        plain_view.hide(self.slot)
        self._restore_orders()
        problem = self._problem(held)
        has_gradient = held is not None and held.grad is not None
        if self.wish.rank0_only and self.wish.writeback:
            problem, has_gradient = self._agree(problem, has_gradient=has_gradient)
        if self.wish.writeback and problem is None:
            with torch.no_grad():
                self._keep_value(held)
                if self.wish.with_grads:
                    self._keep_gradient(held, has_gradient=has_gradient)
        self._retire()
        return problem

    def _restore_orders(self) -> None:
        """A parameter that was deleted gets its place among its module's back, not the last one."""
        for (module, _), order in zip(self.slot.owners, self.orders, strict=True):
            held = module._parameters
            if tuple(held) != order:
                for name in [name for name in order if name in held]:
                    held[name] = held.pop(name)

    def _gather(self, local: torch.Tensor) -> torch.Tensor | None:
        spec = self.slot.spec
        if not self.wish.rank0_only:
            full: torch.Tensor | None = exchange.gather(local, spec)
        elif exchange.is_first_replica(spec):
            full = exchange.gather_to_first(local, spec)
        else:
            full = None
        return full.cpu() if full is not None and self.wish.offload_to_cpu else full

    def _some_rank_has_a_gradient(self) -> bool:
        spec = self.slot.spec
        has = torch.tensor(
            [int(self.slot.parameter.grad is not None)], device=exchange.wire_device(self.slot.local, self.slot.spec)
        )
        if spec.size > 1:
            dist.all_reduce(has, dist.ReduceOp.MAX, group=exchange.group_named(spec.group))
        return bool(has.item())

    def _own_gradient(self) -> torch.Tensor:
        """This rank's part of the gradient; zeros if only other ranks have one."""
        gradient = self.slot.parameter.grad
        return torch.zeros_like(self.slot.local) if gradient is None else _torch.local_tensor(gradient)  # type: ignore[arg-type]

    def _problem(self, held: nn.Parameter | None) -> ConfigError | None:
        if self.plain is None:
            return None
        name = self.unit.parameter_name(self.slot)
        if held is None:
            what, instead = "it was removed from its module", "write into it, in place"
        elif tuple(held.shape) != self.slot.spec.shape:
            what, instead = f"its shape changed to {tuple(held.shape)}", "fully_shard() a model of the new shape"
        elif held.requires_grad is not self.slot.parameter.requires_grad:
            what = f"its requires_grad changed to {held.requires_grad}"
            instead = "parameter.requires_grad_() on the sharded parameters, outside of the context"
        else:
            self._warn_of_lost_gradient(held)
            return None
        return ConfigError(f"{what} inside full_params(), which cannot be kept", where=name, instead=instead)

    def _warn_of_lost_gradient(self, held: nn.Parameter) -> None:
        if held.grad is not None and self.wish.writeback and not self.wish.with_grads:
            warnings.warn(
                "gradients that were made inside full_params() are dropped: pass with_grads=True to keep this rank's "
                "part of them",
                stacklevel=2,
            )

    def _agree(self, problem: ConfigError | None, *, has_gradient: bool) -> tuple[ConfigError | None, bool]:
        """What the first rank says."""
        said = torch.tensor(
            [int(problem is not None), int(has_gradient)], device=exchange.wire_device(self.slot.local, self.slot.spec)
        )
        exchange.broadcast_from_first(said, self.slot.spec)
        if said[0].item() and problem is None:
            problem = ConfigError(
                "the first rank changed it inside full_params() in a way that cannot be kept",
                where=self.unit.parameter_name(self.slot),
                instead="see the error of that rank",
            )
        return problem, bool(said[1].item())

    def _keep_value(self, held: nn.Parameter | None) -> None:
        own = self._own_part(held, self.slot.local)
        # Autograd refuses a backward through memory that was written since: leave alone what is as it was.
        if not torch.equal(exchange.as_bytes(own), exchange.as_bytes(self.slot.local)):
            self.slot.local.copy_(own)

    def _keep_gradient(self, held: nn.Parameter | None, *, has_gradient: bool) -> None:
        parameter = self.slot.parameter
        if not has_gradient:
            parameter.grad = None
            return
        gradient = None if held is None else held.grad
        own = self._own_part(gradient, self.slot.local)
        if parameter.grad is None:
            parameter.grad = _torch.make_dtensor(own.clone(), self.slot.dtensor)
        else:
            _torch.local_tensor(parameter.grad).copy_(own)  # type: ignore[arg-type]

    def _own_part(self, full: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """This rank's part of what it holds, or of what the first rank holds; contiguous, on the device."""
        slot, spec = self.slot, self.slot.spec
        if not self.wish.rank0_only:
            assert full is not None
            part = local_part(full.detach(), spec.dim, spec.size, slot.rank)
            return part.to(device=like.device, dtype=like.dtype).contiguous()
        own = torch.empty_like(like)
        exchange.take_from_first(own, full, spec)
        return own

    def _retire(self) -> None:
        """Makes what users kept of the full parameter point at the sharded one."""
        if self.plain is None:
            return
        if self.plain.requires_grad and _torch.is_saved_by_autograd(self.plain):
            self.plain.register_post_accumulate_grad_hook(_refuse_late_gradient)
        moved.retire(self.plain, self.slot)


def _refuse_late_gradient(_parameter: torch.Tensor) -> None:
    raise ConfigError(
        "a backward reaches full parameters that are gone",
        where="after full_params()",
        instead="run the backward of a forward that ran inside full_params() in there, too",
    )
