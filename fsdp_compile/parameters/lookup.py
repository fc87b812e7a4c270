"""Embeddings that are not gathered: `fsdp::look_up`, its gradient's marker `fsdp::reduce_rows`, `fsdp::average_rows`.

    %y = embedding(unshard(%flat), %ids)     all ranks get the whole table, V rows
    %y = fsdp.look_up(%flat, %ids, spec)     each rank gets the rows that it looks up

Ids travel to the ranks that hold their rows and rows come back; in backward the gradients of rows go there. The sums
are FSDP2's: over the lookups of each rank, in `param_dtype`, and then over the ranks, in the dtype of reductions.
"""

from __future__ import annotations

from typing import Any

import torch

from fsdp_compile._torch import skip_code
from fsdp_compile.parameters import ops
from fsdp_compile.parameters.flat import FlatShard
from fsdp_compile.parameters.row_exchange import RowExchange
from fsdp_compile.parameters.scaling import scaling
from fsdp_compile.parameters.spec import ReadSpec, parse

aten = torch.ops.aten


@torch.library.custom_op("fsdp::look_up", mutates_args=())
def look_up(
    flat: torch.Tensor,
    ids: torch.Tensor,
    spec: str,
    padding_idx: int,  # noqa: ARG001  backward's
    scale_grad_by_freq: bool,  # noqa: ARG001, FBT001  backward's
) -> torch.Tensor:
    """Looks up rows of an embedding that stays sharded.

    Args:
        flat: This rank's flat shard, `[numel]`.
        ids: Row numbers, of any integer dtype and shape.
        spec: Text of a `ReadSpec` of the weight, `[rows, width]`, sharded on dimension 0.
        padding_idx: The row that gets no gradient, -1 for none.
        scale_grad_by_freq: Whether gradients are divided by how often this rank looks up their row.

    Returns:
        `[*ids.shape, width]` in the spec's `param_dtype`.

    Raises:
        IndexError: On every rank of the shard group, if an id of any of them is no row.
    """
    read = parse(spec)
    exchange = RowExchange.of(ids, read)
    own = flat[read.offset : read.offset + read.shard_numel].view(read.shard_shape)
    return exchange.bring(own[exchange.rows].to(read.param_dtype)).view(*ids.shape, read.shape[1])


@look_up.register_fake
def _(flat: torch.Tensor, ids: torch.Tensor, spec: str, *_: object) -> torch.Tensor:
    read = parse(spec)
    return flat.new_empty((*ids.shape, read.shape[1]), dtype=read.param_dtype)


@torch.library.custom_op("fsdp::average_rows", mutates_args=())
def average_rows(
    grad: torch.Tensor,
    ids: torch.Tensor,
    spec: str,
    padding_idx: int,
    scale_grad_by_freq: bool,  # noqa: FBT001
) -> torch.Tensor:
    """Averages the gradients of looked-up rows over all ranks.

    Args:
        grad: `[*ids.shape, width]`: the gradient of what `look_up` returned.
        ids: As for `look_up`, as all that follows.
        spec: The same.
        padding_idx: The same.
        scale_grad_by_freq: The same.

    Returns:
        The gradient of this rank's rows, `[extent]` in the dtype of reductions, padding zero.
    """
    read = parse(spec)
    exchange = RowExchange.of(ids, read)
    rows = exchange.send(_without_padding(grad, ids, padding_idx).reshape(-1, read.shape[1]))
    summed = _sum(rows, exchange, read, scale_by_frequency=scale_grad_by_freq)
    if scaling(read).operation == "avg":
        summed = summed / read.size
    averaged = ops.sum_over_replicas(summed.view(-1), read)
    return torch.nn.functional.pad(averaged, (0, read.extent - read.shard_numel))


@average_rows.register_fake
def _(grad: torch.Tensor, ids: torch.Tensor, spec: str, *_: object) -> torch.Tensor:  # noqa: ARG001
    read = parse(spec)
    return grad.new_empty(read.extent, dtype=read.reduce_dtype)


@torch.library.custom_op("fsdp::reduce_rows", mutates_args=())
def reduce_rows(
    flat: torch.Tensor,
    grad: torch.Tensor,
    ids: torch.Tensor,
    spec: str,
    padding_idx: int,
    scale_grad_by_freq: bool,  # noqa: FBT001
) -> torch.Tensor:
    """`average_rows`, placed like `flat` with zeros elsewhere: the gradient that `look_up` gives to autograd."""
    read = parse(spec)
    owner = FlatShard.of(flat)
    if owner is not None:
        owner.note_gradients([read.offset], read.sync)
    out = torch.zeros_like(flat)
    out[read.offset : read.offset + read.extent] = average_rows(grad, ids, spec, padding_idx, scale_grad_by_freq)
    return out


@reduce_rows.register_fake
def _(flat: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(flat)


def _without_padding(grad: torch.Tensor, ids: torch.Tensor, padding_idx: int) -> torch.Tensor:
    return grad if padding_idx < 0 else grad.masked_fill((ids == padding_idx).unsqueeze(-1), 0)


def _sum(rows: torch.Tensor, exchange: RowExchange, read: ReadSpec, *, scale_by_frequency: bool) -> torch.Tensor:
    """The sum of all ranks' gradients of this rank's rows, `[rows, width]` in the dtype of reductions.

    As in a reduction of full gradients: each rank's own are summed first, and then the ranks', in their order.
    """
    number = read.shard_shape[0]
    found, place = (exchange.askers() * number + exchange.rows).unique(return_inverse=True)
    of_each = aten.embedding_dense_backward(rows, place, len(found), -1, scale_by_frequency).to(read.reduce_dtype)
    before = scaling(read).before
    if before is not None:
        of_each = of_each / before
    return aten.embedding_dense_backward(of_each, found % max(number, 1), number, -1, False)  # noqa: FBT003


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    # The flat shard not through save_for_backward(): see fsdp::unshard.
    ctx.flat, ids, *ctx.settings = inputs
    ctx.save_for_backward(ids)
    ops.note_read(ctx.flat, ctx.settings[0])


skip_code(_save.__code__)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    return torch.ops.fsdp.reduce_rows(ctx.flat, grad, ids, *ctx.settings), None, None, None, None


torch.library.register_autograd("fsdp::look_up", _backward, setup_context=_save)
torch.library.register_autograd("fsdp::reduce_rows", ops.refuse_double_backward)
