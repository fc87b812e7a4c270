"""Parameters that FSDP2 cannot split: each rank has all of them, and their gradients are averaged in one message."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdp_compile._torch.autograd import after_this_backward, backward_in_progress
from fsdp_compile._torch.fully_shard_calls import reduction_of
from fsdp_compile.comm.dtensor_layouts import DTensorLayout
from fsdp_compile.fsdp2.shards import local_of
from fsdp_compile.sharding.arguments import UnitPolicy

Place = tuple[nn.Module, str]
"""A module, and the name of a parameter in it: `to_empty()` and `load_state_dict()` may replace the parameter."""


class Home(NamedTuple):
    """Where the gradient of a replicated parameter is averaged.

    Attributes:
        unit: The module of the call that reduces the other gradients of its unit.
        policy: Of the other parameters, with the mesh that `shard_placement_fn` chose, if any.
    """

    unit: nn.Module
    policy: UnitPolicy


class ReplicatedParams:
    """The replicated parameters of a call, and of earlier calls on modules in its own.

    Gradients that autograd accumulates are averaged at the end of the backward, unless the unit of the parameter does
    not reduce its own (`set_requires_gradient_sync`, `set_requires_all_reduce`); then they wait for one in which it
    does. As with FSDP2, ranks must agree on which parameters have gradients. Parameters that were replaced are found
    in front of forwards of `root`.
    """

    def __init__(self, root: nn.Module, places: dict[Place, Home]) -> None:
        self._places = places
        self._hooks: dict[nn.Parameter, list[RemovableHandle]] = {}
        self._before_forward = root.register_forward_pre_hook(self._pre_forward)
        self._waiting: dict[torch.Tensor, None] = {}
        self._backward = -1
        self.refresh()

    def params(self) -> dict[nn.Parameter, Home]:
        """What is registered now; the same order on all ranks."""
        found = ((module._parameters[name], home) for (module, name), home in self._places.items())
        return {parameter: home for parameter, home in found if parameter is not None}

    def absorb(self, inner: ReplicatedParams) -> None:
        """Averages the parameters of another one, too."""
        inner._before_forward.remove()
        inner._remove_hooks()
        self._places.update(inner._places)
        self.refresh()

    def move(self, parts: Iterable[nn.Module], into: nn.Module) -> None:
        """Parameters of some units are those of another one now."""
        moved = set(parts)
        for place, home in self._places.items():
            if home.unit in moved:
                self._places[place] = home._replace(unit=into)

    def refresh(self) -> None:
        """Follows parameters that were replaced since."""
        now = {parameter: home for parameter, home in self.params().items() if parameter.is_floating_point()}
        if now.keys() == self._hooks.keys():
            return
        self._remove_hooks()
        for parameter, home in now.items():
            required = parameter.requires_grad
            parameter.requires_grad_()  # also of one that is frozen now: it may be trained later
            self._hooks[parameter] = [parameter.register_post_accumulate_grad_hook(self._note)]
            if isinstance(parameter, DTensor):
                self._hooks[parameter].append(parameter.register_hook(_to_unreduced(parameter, home.policy)))
            parameter.requires_grad_(required)

    def _remove_hooks(self) -> None:
        for handle in itertools.chain(*self._hooks.values()):
            handle.remove()
        self._hooks.clear()

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
        messages: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        for parameter, home in self.params().items():
            reduces, given = reduction_of(home.unit)
            if parameter not in self._waiting or not reduces:
                continue
            del self._waiting[parameter]
            if parameter.grad is not None:
                groups = home.policy.groups()
                divide_by = float(math.prod(group.size() for group in groups) if given is None else given)
                messages.setdefault((parameter.grad.dtype, divide_by, *groups), []).append(local_of(parameter.grad))
        for (_, divide_by, *groups), gradients in messages.items():
            message = torch.cat([gradient.reshape(-1) for gradient in gradients])
            for group in groups:
                dist.all_reduce(message, group=group)
            message /= divide_by
            for gradient, part in zip(gradients, message.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))


def _to_unreduced(parameter: DTensor, policy: UnitPolicy) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes gradients of a DTensor what others are until they are averaged: this rank's, laid out as the parameter."""
    mesh = parameter.device_mesh
    dims = frozenset(policy.mesh_dims() if mesh == policy.mesh else ())
    layout = DTensorLayout.of(mesh, parameter.placements, parameter.shape, dims)
    return lambda gradient: layout.gathered(layout.local_gradient(gradient))  # type: ignore[arg-type]
