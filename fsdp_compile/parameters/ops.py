"""The two marker operators: `fsdp::unshard` for a read, `fsdp::reduce_grad` for its gradient.

In a compiled graph the passes replace them by scheduled collectives. In eager code (around a graph break, say) they
gather and reduce by themselves, one parameter at a time, so that results are right everywhere.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_compile._torch import collectives
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.parameters import assemble
from fsdp_compile.parameters.flat import FlatShard
from fsdp_compile.parameters.spec import ReadSpec, parse

_EAGER = assemble.EagerBuilder()


@torch.library.custom_op("fsdp::unshard", mutates_args=())
def unshard(flat: torch.Tensor, spec: str) -> torch.Tensor:
    """Gathers one parameter.

    Args:
        flat: This rank's flat shard, `[numel]`.
        spec: Text of a `ReadSpec`.

    Returns:
        The full parameter, of the spec's shape and `param_dtype`.
    """
    read = parse(spec)
    piece = flat[read.offset : read.offset + read.extent].to(read.param_dtype)
    if read.size > 1:
        piece = collectives.all_gather_into_tensor(piece, read.size, read.group)
        piece = collectives.wait_tensor(piece)
    full = assemble.full_parameter(_EAGER, piece, read, start=0, span=read.extent)
    # A custom operator may not return its input's memory, which a world of one rank would.
    return full.clone() if read.size == 1 else full


@unshard.register_fake
def _(flat: torch.Tensor, spec: str) -> torch.Tensor:
    read = parse(spec)
    if not read.order:
        return flat.new_empty(read.shape, dtype=read.param_dtype)
    stored = flat.new_empty([read.shape[dim] for dim in read.order], dtype=read.param_dtype)
    return stored.permute(assemble.inverse(read.order))


@torch.library.custom_op("fsdp::reduce_grad", mutates_args=())
def reduce_grad(flat: torch.Tensor, grad: torch.Tensor, spec: str) -> torch.Tensor:
    """Averages one read's gradient over all ranks and keeps this rank's part.

    Args:
        flat: The flat shard that was read, `[numel]`.
        grad: Gradient of the full parameter, of the spec's shape.
        spec: Text of a `ReadSpec`.

    Returns:
        A tensor like `flat`: the averaged gradient in the parameter's slot, zeros elsewhere.
    """
    read = parse(spec)
    owner = FlatShard.of(flat)
    if owner is not None:
        owner.note_gradients([read.offset])
    shard = _reduced(assemble.gradient_rows(_EAGER, grad, read).to(read.reduce_dtype).reshape(-1), read)
    out = torch.zeros_like(flat)
    out[read.offset : read.offset + read.extent] = shard
    return out


@reduce_grad.register_fake
def _(flat: torch.Tensor, grad: torch.Tensor, spec: str) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(flat)


def _reduced(message: torch.Tensor, read: ReadSpec) -> torch.Tensor:
    if read.size > 1:
        message = collectives.reduce_scatter_tensor(message.contiguous(), "avg", read.size, read.group)
        message = collectives.wait_tensor(message)
    if read.replicas > 1:
        message = collectives.all_reduce(message.contiguous(), "avg", read.replicate_group)
        message = collectives.wait_tensor(message)
    return message


def _save(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:  # noqa: ARG001
    # Not through save_for_backward(): saved-tensor hooks may hand back a copy, and a copy does not tell its flat shard.
    ctx.flat, ctx.spec = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.fsdp.reduce_grad(ctx.flat, grad, ctx.spec), None


def _refuse_double_backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:  # noqa: ARG001
    raise UnsupportedModelError(
        "a gradient of a parameter's gradient is asked for (double backward)",
        where="torch.autograd.grad(..., create_graph=True) or backward(create_graph=True)",
        instead="torch.autograd.grad(loss, inputs, create_graph=True) for a penalty on gradients of inputs, without "
        "torch.compile",
    )


torch.library.register_autograd("fsdp::unshard", _backward, setup_context=_save)
torch.library.register_autograd("fsdp::reduce_grad", _refuse_double_backward)
