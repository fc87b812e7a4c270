"""What runs before and after a compiled graph in each step: one object, which looks its parameter groups up once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fsdp_compile._torch.autograd import backward_in_progress, below_autograd
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.fsdp2 import edge
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.ir.graph import Phase, Role, StepGraph, role_of
from fsdp_compile.layout.spec import GradPlacement, Update
from fsdp_compile.lower.gradient_outputs import GradOutput, grad_outputs

Compiled = Callable[[list[Any]], Any]


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled graph, with what it needs to know of FSDP; positions are those of its inputs.

    Attributes:
        run: The compiled graph.
        phase: Forward or backward.
        flats: Positions of the flat tensors.
        grads: Of a backward: the gradients that it makes.
    """

    run: Compiled
    phase: Phase
    flats: tuple[int, ...]
    grads: tuple[GradOutput, ...]

    @staticmethod
    def around(step: StepGraph) -> Callable[[Compiled], Compiled]:
        """Reads a transformed graph; the result takes what it is compiled to, and returns what runs in its place."""
        placeholders = step.graph.find_nodes(op="placeholder")
        flats = tuple(i for i, node in enumerate(placeholders) if role_of(node) is Role.FLAT)
        grads = () if step.phase is Phase.FORWARD else tuple(grad_outputs(step))
        return lambda run: CompiledStep(run, step.phase, flats, grads)._boxed()

    def _boxed(self) -> Compiled:
        def run(args: list[Any]) -> Any:
            groups = self.before(args)
            with below_autograd():
                outputs = self.run(args)
            self.after(groups)
            return outputs

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def before(self, args: list[Any]) -> dict[int, ParamGroup]:
        """Puts pending gradients in the place of what stands for them; returns the groups by position."""
        found = {at: group for at in self.flats if (group := ParamGroup.of(args[at])) is not None}
        for each in self.grads:
            group = found.get(each.flat)
            if group is None and not each.covers_all:
                raise UnsupportedModelError(
                    "backward was given a copy of the parameters, and cannot tell which of them get no gradient: hooks "
                    "on saved tensors replaced them",
                    where="torch.autograd.graph.saved_tensors_hooks() or save_on_cpu(), a forward that leaves "
                    "parameters out",
                    instead="hooks that return the very tensors that do not require grad or are leaves",
                )
            for at, placement in (
                (each.unsharded_accumulated_grad, GradPlacement.UNREDUCED),
                (each.partial_reduce_output, GradPlacement.REDUCE_SCATTERED),
            ):
                if at is not None and group is not None:
                    args[at] = group.pending.take(placement, each.offsets)
                elif at is not None:
                    args[at] = torch.zeros(args[at].shape, dtype=args[at].dtype, device=args[at].device)
        return found

    def after(self, groups: dict[int, ParamGroup]) -> None:
        """Tells the edges which parameters have gradients."""
        for each in self.grads:
            group = groups.get(each.flat)
            if group is not None and each.update is Update.AFTER_BACKWARD:
                edge.mark_produced(group, each.offsets)
                if each.grad_placement is not GradPlacement.UNREDUCED:
                    group.unit.model.at_end_of_backward(backward_in_progress(), group)
