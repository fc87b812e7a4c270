"""Parameters that FSDP2 cannot split: each rank has all of them, and their gradients are averaged in one message."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp_compile._torch.autograd import after_this_backward, backward_in_progress
from fsdp_compile._torch.fully_shard_calls import reduction_of
from fsdp_compile.sharding.arguments import UnitPolicy

Place = tuple[nn.Module, str]
"""A module, and the name of a parameter in it: `to_empty()` and `load_state_dict()` may replace the parameter."""


class ReplicatedParams:
    """The replicated parameters of a call, and of earlier calls on modules in its own.

    Gradients that autograd accumulates are averaged at the end of the backward, unless the unit of the parameter does
    not reduce its own (`set_requires_gradient_sync`, `set_requires_all_reduce`); then they wait for one in which it
    does. As with FSDP2, ranks must agree on which parameters have gradients.

    Args:
        root: In front of whose forwards replaced parameters are found.
        policy: Of the call: over which ranks.
        places: Of the parameters, each with the module of the call that reduces the other gradients of its unit.
    """

    def __init__(self, root: nn.Module, policy: UnitPolicy, places: dict[Place, nn.Module]) -> None:
        self._places = places
        self._mesh = policy.mesh
        self._groups = policy.groups()
        self._size = math.prod(group.size() for group in self._groups)
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        self._before_forward = root.register_forward_pre_hook(self._pre_forward)
        self._waiting: dict[torch.Tensor, None] = {}
        self._backward = -1
        self.refresh()

    def params(self) -> dict[nn.Parameter, nn.Module]:
        """What is registered now, with the modules of `places`; the same order on all ranks."""
        found = ((module._parameters[name], unit) for (module, name), unit in self._places.items())
        return {parameter: unit for parameter, unit in found if parameter is not None}

    def absorb(self, inner: ReplicatedParams) -> bool:
        """Averages the parameters of another one, too, if it does so over the same ranks."""
        if inner._mesh != self._mesh:
            return False
        inner._before_forward.remove()
        for handle in inner._hooks.values():
            handle.remove()
        self._places.update(inner._places)
        self.refresh()
        return True

    def move(self, parts: Iterable[nn.Module], into: nn.Module) -> None:
        """Parameters of some units are those of another one now."""
        moved = set(parts)
        self._places = {place: into if unit in moved else unit for place, unit in self._places.items()}

    def refresh(self) -> None:
        """Follows parameters that were replaced since."""
        now = [parameter for parameter in self.params() if parameter.is_floating_point()]
        if {*now} == self._hooks.keys():
            return
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        for parameter in now:
            required = parameter.requires_grad
            parameter.requires_grad_()  # also of one that is frozen now: it may be trained later
            self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._note)
            parameter.requires_grad_(required)

    def _pre_forward(self, _: nn.Module, __: object) -> None:
        if not torch.compiler.is_compiling():
            self.refresh()

    def _note(self, parameter: torch.Tensor) -> None:
        self._waiting[parameter] = None
        if self._backward != backward_in_progress():
            self._backward = backward_in_progress()
            after_this_backward(self._average)

    @torch.no_grad()
    def _average(self) -> None:
        self._backward = -1
        messages: dict[tuple[torch.dtype, float], list[torch.Tensor]] = {}
        for parameter, unit in self.params().items():
            reduction = reduction_of(unit)
            if parameter not in self._waiting or (reduction is not None and not reduction.runs):
                continue
            del self._waiting[parameter]
            if parameter.grad is not None:
                given = None if reduction is None else reduction.divide_by
                divide_by = float(self._size if given is None else given)
                messages.setdefault((parameter.grad.dtype, divide_by), []).append(parameter.grad)
        for (_, divide_by), gradients in messages.items():
            message = torch.cat([gradient.reshape(-1) for gradient in gradients])
            for group in self._groups:
                dist.all_reduce(message, group=group)
            message /= divide_by
            for gradient, part in zip(gradients, message.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
