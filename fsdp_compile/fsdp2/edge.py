"""The edge of autograd from the DTensor parameters of a group to the flat tensor that compiled graphs take.

The users' DTensors are the leaves: their hooks, `autograd.grad`, `backward(inputs=)`, frozen and unused parameters are
autograd's own business. The edge is made once; a node without saved tensors may run any number of times.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_compile._torch.autograd import after_this_backward, backward_in_progress, will_accumulate
from fsdp_compile._torch.dynamo import keep_address, keep_sizes_fixed
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.layout.spec import GradPlacement

if TYPE_CHECKING:
    from fsdp_compile.fsdp2.param_group import ParamGroup

_produced: dict[int, dict[int, set[int]]] = {}
"""By backward pass and group: offsets of parameters whose gradients its graphs have made."""


def of_group(group: ParamGroup, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The memory of a group's flat buffer, with a history that leads to those parameters which are trained."""
    # The first call may be an evaluation.
    with torch.inference_mode(mode=False), torch.enable_grad():
        if any(p.requires_grad for p in parameters):
            made: torch.Tensor = _Edge.apply(weakref.ref(group), *parameters)
        else:
            made = group.flat.detach()
    keep_sizes_fixed(made)
    keep_address(made)
    return made


def accumulated(group: ParamGroup, placement: GradPlacement) -> set[int]:
    """Offsets of the parameters whose gradients the backward that runs keeps, of a graph that reduces them so far.

    None in `torch.autograd.grad`, those alone that `backward(inputs=)` names, and none that was frozen since.
    """
    if placement is not GradPlacement.REDUCED:
        accumulator = torch.autograd.graph.get_gradient_edge(group.pending.leaf(placement)).node
        return {p.spec.offset for p in group.params} if will_accumulate(accumulator) else set()
    node = group.edge.grad_fn
    leaves = node.next_functions if node is not None else ()
    return {
        p.spec.offset
        for p, (leaf, _) in zip(group.params, leaves, strict=False)
        if p.parameter.requires_grad and will_accumulate(leaf)
    }


def mark_produced(group: ParamGroup, offsets: Collection[int]) -> None:
    """Records of which parameters a graph has made gradients, which autograd is about to send through the edge."""
    task = backward_in_progress()
    if task not in _produced:
        _produced[task] = {}
        after_this_backward(lambda: _produced.pop(task, None))
    _produced[task].setdefault(id(group), set()).update(offsets)


def take_produced(group: ParamGroup) -> set[int]:
    """Offsets of the parameters that have gradients in what arrives now."""
    found = _produced.get(backward_in_progress(), {}).pop(id(group), None)
    return {param.spec.offset for param in group.params} if found is None else found


class _Edge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: weakref.ref[ParamGroup], *parameters: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        owner = group()
        assert owner is not None
        ctx.group = group
        ctx.set_materialize_grads(False)
        return owner.flat.detach()

    @staticmethod
    @torch.compiler.disable  # a compiled function may call a backward, which Dynamo watches then
    def backward(ctx: Any, flat_grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        group: ParamGroup | None = ctx.group()
        if flat_grad is None or group is None:
            return (None,) * (1 + len(ctx.next_functions))
        if flat_grad.requires_grad:
            raise double_backward(f"unit {group.title}")
        flat_grad = group.unit.model.pipeline.arrived(group, flat_grad)
        grads: list[torch.Tensor | None] = list(group.sharded_grads(flat_grad, take_produced(group)))
        _write_directly(ctx.next_functions, group, grads)
        return (None, *grads)


def double_backward(where: str) -> UnsupportedModelError:
    """The error for gradients of parameters' gradients."""
    return UnsupportedModelError(
        "a gradient of a parameter's gradient is asked for (double backward)",
        where=f"torch.autograd.grad(..., create_graph=True) or backward(create_graph=True), {where}",
        instead="torch.autograd.grad(loss, inputs, create_graph=True) for a penalty on gradients of inputs, without "
        "torch.compile",
    )


def _write_directly(nodes: Sequence[Any], group: ParamGroup, grads: list[torch.Tensor | None]) -> None:
    """Writes `.grad` where nothing could tell that autograd did not: half of the time that AccumulateGrad takes."""
    for i, (param, grad) in enumerate(zip(group.params, grads, strict=True)):
        leaf = param.parameter
        if grad is None:
            continue
        is_frozen = not leaf.requires_grad  # since the forward: autograd would drop the gradient
        if not is_frozen and (leaf.grad is not None or leaf._backward_hooks or leaf._post_accumulate_grad_hooks):
            continue
        if not will_accumulate(nodes[i][0]):
            continue
        grads[i] = None
        if not is_frozen:
            leaf.grad = grad
