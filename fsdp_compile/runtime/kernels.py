"""Kernels and derivatives of the operators that need run-time state; `ops/` has their schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp_compile._torch.autograd import has_gradient_hooks, is_accumulated_in_this_backward
from fsdp_compile._torch.dynamo import skip_code
from fsdp_compile.comm.failures import refuse_lost_ranks
from fsdp_compile.comm.gather_extension import as_plain
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.layout.profiler_ranges import Range, profiled
from fsdp_compile.layout.spec import GradPlacement, UnshardSpec, Update, parse
from fsdp_compile.ops.embedding import reduced_rows
from fsdp_compile.ops.unshard import reduced_gradient
from fsdp_compile.runtime import gradients, post_backward, read_order, update_in_backward
from fsdp_compile.runtime.read_order import Done
from fsdp_compile.runtime.units import FSDPParamGroup
from fsdp_compile.runtime.unshard_args import refresh_unshard_args

_LIBRARY = torch.library.Library("fsdp_compile", "FRAGMENT")


def consume_accumulated(
    group: FSDPParamGroup,
    offsets: Sequence[int],
    unsharded_accumulated_grad: torch.Tensor | None,
    partial_reduce_output: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The pending gradients that a graph adds to its own for the parameters at `offsets`, consumed.

    Args:
        group: The parameter group.
        offsets: The parameters that get gradients.
        unsharded_accumulated_grad: The one that their reads were given, to add before the reduction.
        partial_reduce_output: The one that their reads were given, to add before the sum over replicas.
    """
    if unsharded_accumulated_grad is None and partial_reduce_output is None:
        return None, None
    grads = group.grads
    if unsharded_accumulated_grad is not None:
        unsharded_accumulated_grad = grads.unsharded_accumulated_grad.consume(unsharded_accumulated_grad, offsets)
    if partial_reduce_output is not None:
        partial_reduce_output = grads.partial_reduce_output.consume(partial_reduce_output, offsets)
    refresh_unshard_args(group)
    post_backward.queue_post_backward(group)
    return unsharded_accumulated_grad, partial_reduce_output


@torch.library.impl("fsdp_compile::reduce_grad", "CompositeExplicitAutograd", lib=_LIBRARY)
@torch.compiler.disable
def _reduce_grad(
    flat: torch.Tensor,
    grad: torch.Tensor,
    spec: str,
    unsharded_accumulated_grad: torch.Tensor | None = None,
    partial_reduce_output: torch.Tensor | None = None,
) -> torch.Tensor:
    read = parse(spec)
    owner = FSDPParamGroup.of(flat)
    if owner is not None:
        gradients.mark_produced(owner, [read.offset], read.grad_placement)
        _note_reduction(owner, read)
        unsharded_accumulated_grad, partial_reduce_output = consume_accumulated(
            owner, [read.offset], unsharded_accumulated_grad, partial_reduce_output
        )
    unit = "" if owner is None else owner.unit.name
    try:
        with profiled(Range.REDUCE, [unit]):
            return reduced_gradient(flat, grad, read, unsharded_accumulated_grad, partial_reduce_output)
    except RuntimeError as error:
        refuse_lost_ranks(error, f"reducing a gradient of unit {unit or '(root)'}")
        raise


def _note_reduction(owner: FSDPParamGroup, read: UnshardSpec) -> None:
    if read.grad_placement is not GradPlacement.UNREDUCED:
        read_order.note(owner, Done.REDUCED, read.offset)


@torch.library.impl("fsdp_compile::reduce_rows", "CompositeExplicitAutograd", lib=_LIBRARY)
@torch.compiler.disable
def _reduce_rows(
    flat: torch.Tensor,
    grad: torch.Tensor,
    ids: torch.Tensor,
    spec: str,
    padding_idx: int,
    scale_grad_by_freq: bool,  # noqa: FBT001
) -> torch.Tensor:
    read = parse(spec)
    owner = FSDPParamGroup.of(flat)
    if owner is not None:
        gradients.mark_produced(owner, [read.offset], read.grad_placement)
        _note_reduction(owner, read)
    with profiled(Range.REDUCE, [] if owner is None else [owner.unit.name]):
        return reduced_rows(flat, grad, ids, spec, padding_idx, scale_grad_by_freq)


@torch.library.impl("fsdp_compile::update", "CompositeExplicitAutograd", lib=_LIBRARY)
def _update(flat: torch.Tensor, gradient: torch.Tensor, offsets: Sequence[int]) -> None:
    """Updates parameters, or leaves their gradients to a later graph of this backward, or to its end.

    Args:
        flat: The flat parameter, `[numel]`.
        gradient: Its gradient, summed over all ranks, `[numel]`.
        offsets: The parameters that have gradients in it.
    """
    owner = FSDPParamGroup.of(flat)
    assert owner is not None  # `lower/wrappers.py` has checked
    if not is_accumulated_in_this_backward(owner.flat_param):
        return  # `torch.autograd.grad` asks for other gradients
    update_in_backward.refuse_second(owner)
    trained = set(offsets) - gradients.frozen_since(owner, offsets)
    owner.grads.commit()
    post_backward.queue_post_backward(owner)
    is_last = update_in_backward.is_complete(owner) and owner.update_state.open_forwards == 0
    waiting = owner.flat_param.grad
    if waiting is not None:
        gradient = waiting + gradient
    elif not is_last or _outlives_update(owner, offsets):
        # It is memory of the graph, which is used again after this operator.
        gradient = gradient.clone()
    owner.flat_param.grad = gradient
    owner.grads.note_use(trained)
    owner.grads.unwritten |= trained
    if is_last:
        gradients.write_sharded_grads(owner)
        update_in_backward.run(owner)
    else:
        # For the hook of the flat parameter, which autograd calls although it adds nothing.
        gradients.mark_produced(owner, offsets, GradPlacement.REDUCED)


def _outlives_update(flat: FSDPParamGroup, offsets: Sequence[int]) -> bool:
    """Whether gradients outlive the update: for a hook, or for an optimizer that steps later."""
    trained = [param.parameter for param in flat.params_at(offsets)]
    return any(update_in_backward.updater_of(p) is None or has_gradient_hooks(p) for p in trained)


def save_read(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    """Saves what the gradient of a read needs; `inputs` are those of `fsdp_compile::unshard`."""
    # Not through save_for_backward(): saved-tensor hooks may return a copy, which has another address than the group's.
    ctx.flat, ctx.spec, _, _, ctx.accumulated, ctx.partial = inputs
    note_read(ctx.flat, ctx.spec)


skip_code(save_read.__code__)


def note_read(flat: torch.Tensor, spec: str) -> None:
    """Counts a forward that autograd has recorded, if an update in backward has to wait for its backward."""
    if parse(spec).update is Update.IN_BACKWARD:
        _note_read(flat)


skip_code(note_read.__code__)


@torch.compiler.disable
def _note_read(flat: torch.Tensor) -> None:
    owner = FSDPParamGroup.of(flat)
    if owner is not None:
        update_in_backward.note_read(owner)


def gradient_of_read(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the inputs of `fsdp_compile::unshard`: of the flat parameter, or of the accumulator."""
    if grad.layout is not torch.strided:
        shape = "x".join(map(str, parse(ctx.spec).shape))
        raise UnsupportedModelError(
            "a parameter gets a sparse gradient, and gradients are reduced in full",
            where=f"the parameter of shape {shape}, in nn.Embedding(sparse=True) or nn.EmbeddingBag(sparse=True)",
            instead="sparse=False; options={'embedding': 'sharded'} keeps a large table from being gathered",
        )
    # Parameters of a class make results of it, and so gradients of plain parameters beside them.
    gradient = torch.ops.fsdp_compile.reduce_grad(ctx.flat, as_plain(grad), ctx.spec, ctx.accumulated, ctx.partial)
    if parse(ctx.spec).grad_placement is GradPlacement.REDUCED:
        # The gradient of the flat parameter; otherwise it goes to the accumulator, the fourth argument of
        # `fsdp_compile::unshard`.
        return gradient, None, None, None, None, None
    return None, None, None, gradient, None, None


def refuse_double_backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:  # noqa: ARG001
    """The derivative of a gradient's marker: there is none."""
    raise UnsupportedModelError(
        "a gradient of a parameter's gradient is asked for (double backward)",
        where="torch.autograd.grad(..., create_graph=True) or backward(create_graph=True)",
        instead="torch.autograd.grad(loss, inputs, create_graph=True) for a penalty on gradients of inputs, without "
        "torch.compile",
    )


def _save_look_up(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    # The parameter group not through save_for_backward(): see fsdp_compile::unshard.
    ctx.flat, ids, *ctx.settings = inputs
    ctx.save_for_backward(ids)
    note_read(ctx.flat, ctx.settings[0])


skip_code(_save_look_up.__code__)


def _backward_of_look_up(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    return torch.ops.fsdp_compile.reduce_rows(ctx.flat, grad, ids, *ctx.settings), None, None, None, None


torch.library.register_autograd("fsdp_compile::unshard", gradient_of_read, setup_context=save_read)
torch.library.register_autograd("fsdp_compile::reduce_grad", refuse_double_backward, lib=_LIBRARY)
torch.library.register_autograd("fsdp_compile::look_up", _backward_of_look_up, setup_context=_save_look_up)
torch.library.register_autograd("fsdp_compile::reduce_rows", refuse_double_backward, lib=_LIBRARY)
