"""Embeddings that stay sharded: `look_up`, its gradient's marker `reduce_rows`, `average_rows`.

    %y = embedding(unshard(%flat), %ids)     all ranks get the whole table, V rows
    %y = fsdp_compile.look_up(%flat, %ids, spec)     each rank gets the rows that it looks up

Ids are sent to the ranks that have their rows, and rows are sent back; in backward the gradients of rows go there. The
sums are FSDP2's: over the lookups of each rank, in `param_dtype`, and then over the ranks, in the reduce dtype.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from fsdp_compile._torch.distributed import resolve_group
from fsdp_compile.layout.spec import UnshardSpec, parse, scaling
from fsdp_compile.ops.unshard import sum_over_replicas

aten = torch.ops.aten
_WAITS_FOR_SIZES = (torch.Tag.cudagraph_unsafe,)
"""The host reads how many rows travel: no CUDA graph can be recorded of that."""
_BAD_IDS = -1
"""Sent in place of a number of rows by a rank whose ids are out of range: then all ranks raise, and none waits."""


@dataclasses.dataclass(frozen=True)
class _RowExchange:
    """Which ranks want which rows of which rank, of a parameter that is sharded by rows.

        ids of a rank         [5, 0, 5, 9]          rows 0-3 are rank 0's, 4-7 rank 1's, 8-11 rank 2's
        asked of the owners   0: [0]  1: [5, 5]  2: [9]
        rows come back, gradients go there, in the order in which they were asked for

    The ranks exchange first how many rows each wants of each other, so that only these rows are sent, and ranks may
    want different numbers of them.

    Attributes:
        order: The positions of this rank's ids, `[ids]`, owner after owner.
        asked: How many rows this rank wants of each rank.
        wanted: How many rows each rank wants of this one.
        rows: Which of this rank's own rows the others want, rank after rank: `[sum(wanted)]`.
    """

    order: torch.Tensor
    asked: list[int]
    wanted: list[int]
    rows: torch.Tensor
    group: dist.ProcessGroup

    @classmethod
    def of(cls, ids: torch.Tensor, spec: UnshardSpec) -> _RowExchange:
        """Exchanges which rows of the parameter the ranks of the shard group want; all of them call this together.

        Raises:
            IndexError: On every rank of the shard group, if an id of any of them is no row.
        """
        group = resolve_group(spec.group)
        assert group is not None
        ids = ids.reshape(-1).long()
        rows_per_rank = spec.shard_shape[0]
        owners = ids.div(rows_per_rank, rounding_mode="floor").clamp(0, spec.size - 1)
        order = owners.argsort(stable=True)
        asked = owners.bincount(minlength=spec.size)
        good = ((ids >= 0) & (ids < spec.shape[0])).all()
        wanted = _exchanged(torch.where(good, asked, _BAD_IDS), group)
        asked_of, wanted_by = torch.stack([asked, wanted]).tolist()  # the host waits once: sizes depend on them
        bad = [rank for rank, number in enumerate(wanted_by) if number == _BAD_IDS]
        table = f"in an embedding of {spec.shape[0]} rows"
        if group.rank() in bad:
            raise IndexError(f"ids from {ids.min().item()} to {ids.max().item()} are looked up {table}")
        if bad:
            ranks = ", ".join(str(dist.get_process_group_ranks(group)[rank]) for rank in bad)
            raise IndexError(f"rank {ranks} looks up ids that are out of range {table}")
        rows = _exchanged((ids % rows_per_rank)[order], group, sent=asked_of, received=wanted_by)
        return cls(order, asked_of, wanted_by, rows, group)

    def bring(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends rows that others want, `[sum(wanted), width]`; returns those that this rank wants, `[ids, width]`."""
        arrived = _exchanged(rows, self.group, sent=self.wanted, received=self.asked)
        return torch.empty_like(arrived).index_copy_(0, self.order, arrived)

    def send(self, gradients: torch.Tensor) -> torch.Tensor:
        """Sends gradients of rows, `[ids, width]`, to their ranks; returns those of `rows`, `[sum(wanted), width]`."""
        return _exchanged(gradients[self.order], self.group, sent=self.asked, received=self.wanted)


def _exchanged(
    message: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    sent: list[int] | None = None,
    received: list[int] | None = None,
) -> torch.Tensor:
    """The parts of all ranks for this one, rank after rank; equal parts if no numbers of rows are given."""
    length = message.shape[0] if received is None else sum(received)
    # Zeros: the fake group of tests and benchmarks, which sends nothing, leaves the memory as it is.
    arrived = message.new_zeros((length, *message.shape[1:]))
    dist.all_to_all_single(arrived, message, received, sent, group)
    return arrived


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
    exchange = _RowExchange.of(ids, read)
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
    exchange = _RowExchange.of(ids, read)
    if padding_idx >= 0:
        grad = grad.masked_fill((ids == padding_idx).unsqueeze(-1), 0)
    rows = exchange.send(grad.reshape(-1, read.shape[1]))
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


def _sum(rows: torch.Tensor, exchange: _RowExchange, read: UnshardSpec, *, scale_by_frequency: bool) -> torch.Tensor:
    """The sum of all ranks' gradients of this rank's rows, `[rows, width]` in the reduce dtype."""
    number, device = read.shard_shape[0], exchange.rows.device
    ranks, wanted = torch.arange(len(exchange.wanted), device=device), torch.tensor(exchange.wanted, device=device)
    wanted_by = ranks.repeat_interleave(wanted, output_size=len(exchange.rows))  # which rank wants each row
    found, place = (wanted_by * number + exchange.rows).unique(return_inverse=True)
    # As in a reduction of full gradients: each rank's own are summed first, and then the ranks', in their order.
    of_each = aten.embedding_dense_backward(rows, place, len(found), -1, scale_by_frequency).to(read.reduce_dtype)
    before = scaling(read).before
    if before is not None:
        of_each = of_each / before
    return aten.embedding_dense_backward(of_each, found % max(number, 1), number, -1, False)  # noqa: FBT003


LOOK_UP = torch.ops.fsdp_compile.look_up.default
REDUCE_ROWS = torch.ops.fsdp_compile.reduce_rows.default
AVERAGE_ROWS = torch.ops.fsdp_compile.average_rows.default
