"""Embeddings that stay sharded: `look_up`, its gradient's marker `reduce_rows`, `average_rows`.

    %y = embedding(unshard(%flat), %ids)     all ranks get the whole table, V rows
    %y = fsdp_compile.look_up(%flat, %ids, spec)     each rank gets the rows that it looks up

Ids are sent to the ranks that have their rows, and rows are sent back; in backward the gradients of rows go there. The
sums are FSDP2's: over the lookups of each rank, in `param_dtype`, and then over the ranks, in the reduce dtype.
"""

from __future__ import annotations

import torch

from fsdp_compile.layout.spec import UnshardSpec, parse, scaling
from fsdp_compile.ops.row_exchange import RowExchange
from fsdp_compile.ops.unshard import sum_over_replicas

aten = torch.ops.aten
_WAITS_FOR_SIZES = (torch.Tag.cudagraph_unsafe,)
"""The host reads how many rows travel: no CUDA graph can be recorded of that."""


@torch.library.custom_op("fsdp_compile::look_up", mutates_args=(), tags=_WAITS_FOR_SIZES)
def look_up(
    flat: torch.Tensor,
    ids: torch.Tensor,
    spec: str,
    padding_idx: int,  # noqa: ARG001  backward's
    scale_grad_by_freq: bool,  # noqa: ARG001, FBT001  backward's
) -> torch.Tensor:
    """Looks up rows of an embedding that stays sharded.

    Args:
        flat: This rank's flat parameter, `[numel]`.
        ids: Row numbers, of any integer dtype and shape.
        spec: Text of an `UnshardSpec` of the weight, `[rows, width]`, sharded on dimension 0.
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


@torch.library.custom_op("fsdp_compile::average_rows", mutates_args=(), tags=_WAITS_FOR_SIZES)
def average_rows(
    grad: torch.Tensor,
    ids: torch.Tensor,
    spec: str,
    padding_idx: int,
    scale_grad_by_freq: bool,  # noqa: FBT001
) -> torch.Tensor:
    """Averages the gradients of looked-up rows over all ranks; other arguments are those of `look_up`.

    Returns:
        The gradient of this rank's rows, `[extent]` in the reduce dtype, padding zero.
    """
    read = parse(spec)
    exchange = RowExchange.of(ids, read)
    rows = exchange.send(_without_padding(grad, ids, padding_idx).reshape(-1, read.shape[1]))
    summed = _sum(rows, exchange, read, scale_by_frequency=scale_grad_by_freq)
    if scaling(read).operation == "avg":
        summed = summed / read.size
    averaged = sum_over_replicas(summed.view(-1), read)
    return torch.nn.functional.pad(averaged, (0, read.extent - read.shard_numel))


@average_rows.register_fake
def _(grad: torch.Tensor, ids: torch.Tensor, spec: str, *_: object) -> torch.Tensor:  # noqa: ARG001
    read = parse(spec)
    return grad.new_empty(read.extent, dtype=read.reduce_dtype)


_LIBRARY = torch.library.Library("fsdp_compile", "FRAGMENT")
_LIBRARY.define(
    "reduce_rows(Tensor flat, Tensor grad, Tensor ids, str spec, int padding_idx, bool scale_grad_by_freq) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def reduced_rows(
    flat: torch.Tensor,
    grad: torch.Tensor,
    ids: torch.Tensor,
    spec: str,
    padding_idx: int,
    scale_grad_by_freq: bool,  # noqa: FBT001
) -> torch.Tensor:
    """The result of `fsdp_compile::reduce_rows`: `average_rows` at the parameter's place in a tensor like `flat`."""
    read = parse(spec)
    out = torch.zeros_like(flat)
    out[read.offset : read.offset + read.extent] = average_rows(grad, ids, spec, padding_idx, scale_grad_by_freq)
    return out


@torch.library.register_fake("fsdp_compile::reduce_rows", lib=_LIBRARY)
def _(flat: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(flat)


def _without_padding(grad: torch.Tensor, ids: torch.Tensor, padding_idx: int) -> torch.Tensor:
    return grad if padding_idx < 0 else grad.masked_fill((ids == padding_idx).unsqueeze(-1), 0)


def _sum(rows: torch.Tensor, exchange: RowExchange, read: UnshardSpec, *, scale_by_frequency: bool) -> torch.Tensor:
    """The sum of all ranks' gradients of this rank's rows, `[rows, width]` in the reduce dtype."""
    number = read.shard_shape[0]
    found, place = (exchange.askers() * number + exchange.rows).unique(return_inverse=True)
    # As in a reduction of full gradients: each rank's own are summed first, and then the ranks', in their order.
    of_each = aten.embedding_dense_backward(rows, place, len(found), -1, scale_by_frequency).to(read.reduce_dtype)
    before = scaling(read).before
    if before is not None:
        of_each = of_each / before
    return aten.embedding_dense_backward(of_each, found % max(number, 1), number, -1, False)  # noqa: FBT003


LOOK_UP = torch.ops.fsdp_compile.look_up.default
REDUCE_ROWS = torch.ops.fsdp_compile.reduce_rows.default
AVERAGE_ROWS = torch.ops.fsdp_compile.average_rows.default
