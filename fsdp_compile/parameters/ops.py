"""The two marker operators: `fsdp::unshard` for a read, `fsdp::reduce_grad` for its gradient.

In a compiled graph the passes replace them by scheduled collectives. In eager code (around a graph break, say) they
gather and reduce by themselves, one parameter at a time, so that results are right everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp_compile._torch import collectives, skip_code
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.parameters import assemble, epilogue, hooks, quantize, updating
from fsdp_compile.parameters.flat import FlatShard
from fsdp_compile.parameters.scaling import scaling
from fsdp_compile.parameters.spec import ReadSpec, Sync, Update, parse
from fsdp_compile.parameters.variants import publish

_EAGER = assemble.EagerBuilder()


@torch.library.custom_op("fsdp::unshard", mutates_args=())
def unshard(
    flat: torch.Tensor,
    spec: str,
    kept: torch.Tensor | None = None,
    into: torch.Tensor | None = None,  # noqa: ARG001  autograd's
    held: torch.Tensor | None = None,  # noqa: ARG001  backward's
    partial: torch.Tensor | None = None,  # noqa: ARG001  backward's
) -> torch.Tensor:
    """Gathers one parameter.

    Args:
        flat: This rank's flat shard, `[numel]`.
        spec: Text of a `ReadSpec`.
        kept: The full parameter, if it was gathered before and is still there.
        into: The leaf that the gradient goes to in place of `flat`, if it is not summed over all ranks.
        held: Full gradients that wait for their reduction, `[size * numel]`: backward adds them to its own.
        partial: Gradients that wait for their sum over replicas, `[numel]`: backward adds them to its own.

    Returns:
        The full parameter, of the spec's shape and `param_dtype`.
    """
    read = parse(spec)
    if kept is not None:
        return kept.clone()  # a custom operator may not return its input
    piece = flat[read.offset : read.offset + read.extent]
    if read.compute:
        piece = piece.to(read.compute)
    if read.gather_dtype is not None:
        scales = quantize.block_scales(piece, read.gather_dtype)
        sent = _gathered(quantize.quantize(piece, scales, read.gather_dtype), read)
        piece = quantize.dequantize(sent, _gathered(scales, read), read.gather_dtype, read.size, read.param_dtype)
    else:
        piece = _gathered(piece.to(read.param_dtype), read)
    full = assemble.full_parameter(_EAGER, piece, read, start=0, span=read.extent)
    # A custom operator may not return its input's memory, which a world of one rank would.
    return full.clone() if read.size == 1 else full


def _gathered(message: torch.Tensor, read: ReadSpec) -> torch.Tensor:
    if read.size == 1:
        return message
    return collectives.wait_tensor(collectives.all_gather_into_tensor(message, read.size, read.group))


@unshard.register_fake
def _(flat: torch.Tensor, spec: str, *_: torch.Tensor | None) -> torch.Tensor:
    read = parse(spec)
    device = read.compute or flat.device
    if not read.order:
        return flat.new_empty(read.shape, dtype=read.param_dtype, device=device)
    stored = flat.new_empty([read.shape[dim] for dim in read.order], dtype=read.param_dtype, device=device)
    return stored.permute(assemble.inverse(read.order))


@torch.library.custom_op("fsdp::reduce_grad", mutates_args=())
def reduce_grad(
    flat: torch.Tensor,
    grad: torch.Tensor,
    spec: str,
    held: torch.Tensor | None = None,
    partial: torch.Tensor | None = None,
) -> torch.Tensor:
    """Averages one read's gradient over the ranks that its spec says, and keeps this rank's part.

    Args:
        flat: The flat shard that was read, `[numel]`.
        grad: Gradient of the full parameter, of the spec's shape.
        spec: Text of a `ReadSpec`.
        held: Full gradients to add before the reduction, `[size * numel]`.
        partial: Gradients to add before the sum over replicas, `[numel]`.

    Returns:
        The gradient in the parameter's slot, zeros elsewhere: for `Sync.ALL` a tensor like `flat`; for `Sync.SHARD`
        `[numel]`, and for `Sync.NONE` `[size * numel]`, in the dtype of reductions.
    """
    read = parse(spec)
    owner = FlatShard.of(flat)
    if owner is not None:
        owner.note_gradients([read.offset], read.sync)
        held, partial = accompany(owner, [read.offset], held, partial)
    rows = assemble.gradient_rows(_EAGER, grad, read).to(read.reduce_dtype)
    if read.sync is Sync.NONE:
        return _placed(rows, rows.new_zeros((read.size, flat.numel())), read)
    if held is not None:
        rows = _slot(held.view(read.size, -1), read) + rows
    gradient = sum_over_shards(rows.reshape(-1), read)
    if read.sync is Sync.ALL:
        gradient = sum_over_replicas(gradient if partial is None else _slot(partial, read) + gradient, read)
        return _placed(gradient, torch.zeros_like(flat), read)
    return _placed(gradient, gradient.new_zeros(flat.numel()), read)


@reduce_grad.register_fake
def _(flat: torch.Tensor, grad: torch.Tensor, spec: str, *_: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG001
    read = parse(spec)
    if read.sync is Sync.ALL:
        return torch.empty_like(flat)
    numel = gradient_numel(flat.numel(), read)
    return flat.new_empty(numel, dtype=read.reduce_dtype, device=read.compute or flat.device)


def gradient_numel(numel: int, spec: ReadSpec) -> int:
    """Elements of what a gradient is accumulated into, for a flat shard of `numel`."""
    return numel * spec.size if spec.sync is Sync.NONE else numel


def accompany(
    flat: FlatShard, offsets: Sequence[int], held: torch.Tensor | None, partial: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What may really be added to gradients of the slots at `offsets`: nothing that has been reduced before.

    Args:
        flat: The flat shard.
        offsets: Slots that get gradients.
        held: What their reads were given to add before the reduction.
        partial: What their reads were given to add before the sum over replicas.
    """
    if held is None and partial is None:
        return None, None
    held = None if held is None else flat.held.take(held, offsets)
    partial = None if partial is None else flat.partial.take(partial, offsets)
    publish(flat)
    epilogue.expect(flat)
    return held, partial


def _slot(value: torch.Tensor, read: ReadSpec) -> torch.Tensor:
    return value[..., read.offset : read.offset + read.extent]


def _placed(slot: torch.Tensor, out: torch.Tensor, read: ReadSpec) -> torch.Tensor:
    _slot(out, read).copy_(slot)
    return out.view(-1)


def sum_over_shards(message: torch.Tensor, read: ReadSpec) -> torch.Tensor:
    """The first half of a reduction.

    Args:
        message: `[size * n]`, in the dtype of reductions.
        read: The slot, or any of a flat shard.

    Returns:
        This rank's `[n]` of what its replica has.
    """
    if read.hook and read.size > 1:
        return hooks.hook_scatter(message.contiguous(), read.size, read.hook)
    scaled = scaling(read)
    if scaled.before is not None:
        message = message / scaled.before
    if read.size > 1:
        message = collectives.reduce_scatter_tensor(
            message.contiguous(), scaled.operation, read.size, read.scatter_group
        )
        message = collectives.wait_tensor(message)
    return message


def sum_over_replicas(message: torch.Tensor, read: ReadSpec) -> torch.Tensor:
    """The second half of a reduction: the average of what the replicas have, `[n]`."""
    if read.hook and read.size == 1:
        return hooks.hook_reduce(message, read.hook)
    scaled = scaling(read)
    if read.replicas > 1:
        message = collectives.all_reduce(message.contiguous(), scaled.operation, read.replicate_group)
        message = collectives.wait_tensor(message)
    return message if scaled.after is None else message / scaled.after


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    # Not through save_for_backward(): saved-tensor hooks may hand back a copy, and a copy does not tell its flat shard.
    ctx.flat, ctx.spec, _, _, ctx.held, ctx.partial = inputs
    note_read(ctx.flat, ctx.spec)


skip_code(_save.__code__)


def note_read(flat: torch.Tensor, spec: str) -> None:
    """Notes a forward that autograd has recorded, where an update in backward has to wait for its backward."""
    if parse(spec).update is Update.IN_BACKWARD:
        _note_read(flat)


skip_code(note_read.__code__)


@torch.compiler.disable
def _note_read(flat: torch.Tensor) -> None:
    owner = FlatShard.of(flat)
    if owner is not None:
        updating.note_read(owner)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gradient = torch.ops.fsdp.reduce_grad(ctx.flat, grad, ctx.spec, ctx.held, ctx.partial)
    if parse(ctx.spec).sync is Sync.ALL:
        return gradient, None, None, None, None, None
    return None, None, None, gradient, None, None


def refuse_double_backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:  # noqa: ARG001
    """The derivative of a gradient's marker, which there is none of."""
    raise UnsupportedModelError(
        "a gradient of a parameter's gradient is asked for (double backward)",
        where="torch.autograd.grad(..., create_graph=True) or backward(create_graph=True)",
        instead="torch.autograd.grad(loss, inputs, create_graph=True) for a penalty on gradients of inputs, without "
        "torch.compile",
    )


torch.library.register_autograd("fsdp::unshard", _backward, setup_context=_save)
torch.library.register_autograd("fsdp::reduce_grad", refuse_double_backward)
