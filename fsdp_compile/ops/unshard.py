"""The two marker operators: `fsdp_compile::unshard` for a read, `fsdp_compile::reduce_grad` for its gradient.

In a compiled graph the passes replace them by scheduled collectives. In eager code (around a graph break, say) they
gather and reduce by themselves, one parameter at a time.
"""

from __future__ import annotations

import torch

from fsdp_compile._torch.distributed import collectives
from fsdp_compile._torch.dynamo import is_tracing_python
from fsdp_compile.layout.messages import EAGER, full_parameter, gradient_rows, inverse
from fsdp_compile.layout.spec import GradPlacement, UnshardSpec, parse, scaling
from fsdp_compile.ops import comm_hook, quantize


@torch.library.custom_op("fsdp_compile::unshard", mutates_args=())
def unshard(
    flat: torch.Tensor,
    spec: str,
    unsharded_param: torch.Tensor | None = None,
    grad_accumulator: torch.Tensor | None = None,  # noqa: ARG001  autograd's
    unsharded_accumulated_grad: torch.Tensor | None = None,  # noqa: ARG001  backward's
    partial_reduce_output: torch.Tensor | None = None,  # noqa: ARG001  backward's
) -> torch.Tensor:
    """Gathers one parameter.

    Args:
        flat: This rank's flat parameter, `[numel]`.
        spec: Text of an `UnshardSpec`.
        unsharded_param: The unsharded parameter, if it is gathered already.
        grad_accumulator: The leaf that the gradient goes to in place of `flat`, if it is not fully reduced.
        unsharded_accumulated_grad: Pending unsharded gradients, `[size * numel]`: backward adds them to its own.
        partial_reduce_output: Pending gradients that lack their sum over replicas, `[numel]`: likewise.

    Returns:
        The unsharded parameter, of the spec's shape and `param_dtype`.
    """
    read = parse(spec)
    if unsharded_param is not None:
        return unsharded_param.clone()  # a custom operator may not return its input
    piece = flat[read.offset : read.offset + read.extent]
    if read.compute:
        piece = piece.to(read.compute)
    if read.gather_format:
        scales = quantize.block_scales(piece, read.gather_format)
        sent = _gathered(quantize.quantize(piece, scales, read.gather_format), read)
        piece = quantize.dequantize(sent, _gathered(scales, read), read.gather_format, read.size, read.param_dtype)
    else:
        piece = _gathered(piece.to(read.param_dtype), read)
    full = full_parameter(EAGER, piece, read, start=0, span=read.extent)
    # A custom operator may not return its input's memory, which a world of one rank would.
    return full.clone() if read.size == 1 else full


def _gathered(message: torch.Tensor, read: UnshardSpec) -> torch.Tensor:
    if read.size == 1:
        return message
    return collectives.wait_tensor(collectives.all_gather_into_tensor(message, read.size, read.group))


@unshard.register_fake
def _(flat: torch.Tensor, spec: str, *_: torch.Tensor | None) -> torch.Tensor:
    if not is_tracing_python():
        return _empty(flat, spec)
    # Dynamo decides by this tensor what the user's code finds out about the parameter: every read of it is one object
    # and an `nn.Parameter`.
    read = parse(spec)
    made: dict[tuple[object, ...], torch.Tensor] = flat.__dict__.setdefault(_READS, {})
    key = (read.offset, read.param_dtype, torch.is_grad_enabled())
    if key not in made:
        made[key] = _empty(flat, spec)
        made[key]._is_param = True
    return made[key]


_READS = "_fsdp_reads"
"""Attribute of Dynamo's fake flat parameter: the fake results of its reads in this graph."""


def _empty(flat: torch.Tensor, spec: str) -> torch.Tensor:
    read = parse(spec)
    device = read.compute or flat.device
    if not read.order:
        return flat.new_empty(read.shape, dtype=read.param_dtype, device=device)
    stored = flat.new_empty([read.shape[dim] for dim in read.order], dtype=read.param_dtype, device=device)
    return stored.permute(inverse(read.order))


_LIBRARY = torch.library.Library("fsdp_compile", "FRAGMENT")
_LIBRARY.define(
    "reduce_grad(Tensor flat, Tensor grad, str spec, Tensor? unsharded_accumulated_grad=None, "
    "Tensor? partial_reduce_output=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def reduced_gradient(
    flat: torch.Tensor,
    grad: torch.Tensor,
    read: UnshardSpec,
    unsharded_accumulated_grad: torch.Tensor | None = None,
    partial_reduce_output: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result of `fsdp_compile::reduce_grad`: one read's gradient, averaged over the ranks that its spec says.

    Args:
        flat: The flat parameter that was read, `[numel]`.
        grad: Gradient of the full parameter, of the spec's shape.
        read: The spec.
        unsharded_accumulated_grad: Full gradients to add before the reduction, `[size * numel]`.
        partial_reduce_output: Gradients to add before the sum over replicas, `[numel]`.

    Returns:
        This rank's part of the gradient at the parameter's place, zeros elsewhere: for `GradPlacement.REDUCED` a tensor
        like `flat`; for `GradPlacement.REDUCE_SCATTERED` `[numel]`, and for `GradPlacement.UNREDUCED` `[size * numel]`,
        in the dtypes of gradients that wait, and that are about to.
    """
    rows = gradient_rows(EAGER, grad, read)
    if read.grad_placement is GradPlacement.UNREDUCED:
        rows = rows.to(read.unrounded_dtype)
        return _placed(rows, rows.new_zeros((read.size, flat.numel())), read)
    if unsharded_accumulated_grad is not None:
        rows = _slot(unsharded_accumulated_grad.view(read.size, -1), read) + rows.to(read.unrounded_dtype)
    gradient = sum_over_shards(rows.reshape(-1).to(read.reduce_dtype), read)
    if read.grad_placement is GradPlacement.REDUCED:
        if partial_reduce_output is not None:
            gradient = (_slot(partial_reduce_output, read) + gradient).to(read.reduce_dtype)
        return _placed(sum_over_replicas(gradient, read), torch.zeros_like(flat), read)
    return _placed(gradient, gradient.new_zeros(flat.numel(), dtype=read.unreduced_dtype), read)


@torch.library.register_fake("fsdp_compile::reduce_grad", lib=_LIBRARY)
def _(flat: torch.Tensor, grad: torch.Tensor, spec: str, *_: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG001
    read = parse(spec)
    if read.grad_placement is GradPlacement.REDUCED:
        return torch.empty_like(flat)
    numel, dtype = flat.numel(), read.unreduced_dtype
    if read.grad_placement is GradPlacement.UNREDUCED:
        numel, dtype = numel * read.size, read.unrounded_dtype
    return flat.new_empty(numel, dtype=dtype, device=read.compute or flat.device)


def _slot(value: torch.Tensor, read: UnshardSpec) -> torch.Tensor:
    return value[..., read.offset : read.offset + read.extent]


def _placed(slot: torch.Tensor, out: torch.Tensor, read: UnshardSpec) -> torch.Tensor:
    _slot(out, read).copy_(slot)
    return out.view(-1)


def sum_over_shards(message: torch.Tensor, read: UnshardSpec) -> torch.Tensor:
    """The first stage of a reduction: this rank's `[n]` of the sum of `[size * n]` over its shard group."""
    if read.hook and read.size > 1:
        return comm_hook.hook_scatter(message.contiguous(), read.size, read.hook)
    scaled = scaling(read)
    if scaled.before is not None:
        message = message / scaled.before
    if read.size > 1:
        message = collectives.reduce_scatter_tensor(
            message.contiguous(), scaled.operation, read.size, read.scatter_group
        )
        message = collectives.wait_tensor(message)
    return message


def sum_over_replicas(message: torch.Tensor, read: UnshardSpec) -> torch.Tensor:
    """The second stage of a reduction: the average over the replicas, `[n]`."""
    if read.hook and read.size == 1:
        return comm_hook.hook_reduce(message, read.hook)
    scaled = scaling(read)
    if read.replicas > 1:
        message = collectives.all_reduce(message.contiguous(), scaled.operation, read.replicate_group)
        message = collectives.wait_tensor(message)
    return message if scaled.after is None else message / scaled.after


UNSHARD = torch.ops.fsdp_compile.unshard.default
REDUCE_GRAD = torch.ops.fsdp_compile.reduce_grad.default
