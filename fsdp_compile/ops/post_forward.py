"""Parameters of which each rank keeps 1/k from forward to backward (`reshard_after_forward=k`).

The ranks of a shard group form runs of k neighbours. A gathered message, rank after rank, falls into k equal parts; the
i-th rank of each run keeps the i-th part, so that a run holds all of it and backward gathers over k ranks alone. The
parts come in rank order, so what backward gathers is the message that forward had.

    fsdp.post_forward_part(message, k, group)     this rank's part of a gathered message
    fsdp.shard_post_forward(full, spec)                the marker for it in a captured graph
    fsdp.unshard_post_forward(part, spec)            the marker for the gather out of the parts

Which part is a rank's own is looked up when the operator runs: a graph names the group alone, alike on every rank.
"""

from __future__ import annotations

import torch

from fsdp_compile._torch.distributed import collectives, resolve_group
from fsdp_compile.layout.messages import EagerBuilder, full_parameter, gradient_rows
from fsdp_compile.layout.spec import parse

_EAGER = EagerBuilder()


@torch.library.custom_op("fsdp::post_forward_part", mutates_args=())
def post_forward_part(message: torch.Tensor, parts: int, group: str) -> torch.Tensor:
    """Copies this rank's part out of a gathered message.

    Args:
        message: `[numel]`, rank after rank.
        parts: Ranks in the group, which divides `numel`.
        group: Alias of the group that keeps the message together.

    Returns:
        `[numel / parts]`.
    """
    held = resolve_group(group)
    assert held is not None
    return message.chunk(parts)[held.rank()].clone()


@post_forward_part.register_fake
def _(message: torch.Tensor, parts: int, group: str) -> torch.Tensor:  # noqa: ARG001
    return message.new_empty(message.shape[0] // parts)


@torch.library.custom_op("fsdp::shard_post_forward", mutates_args=())
def shard_post_forward(full: torch.Tensor, spec: str) -> torch.Tensor:
    """This rank's part of a parameter, padding included.

    Args:
        full: The full parameter.
        spec: Text of an `UnshardSpec` with `post_forward_size` > 1.

    Returns:
        `[post_forward_numel]`.
    """
    read = parse(spec)
    message = gradient_rows(_EAGER, full, read).reshape(-1)  # the rows of each rank, as they are gathered
    return torch.ops.fsdp.post_forward_part(message, read.post_forward_size, read.post_forward_group)


@shard_post_forward.register_fake
def _(full: torch.Tensor, spec: str) -> torch.Tensor:
    return full.new_empty(parse(spec).post_forward_numel)


@torch.library.custom_op("fsdp::unshard_post_forward", mutates_args=())
def unshard_post_forward(part: torch.Tensor, spec: str) -> torch.Tensor:
    """Gathers a parameter out of the parts that a run of ranks has kept.

    Args:
        part: `[post_forward_numel]`.
        spec: Text of an `UnshardSpec` with `post_forward_size` > 1.

    Returns:
        The full parameter.
    """
    read = parse(spec)
    message = collectives.all_gather_into_tensor(part, read.post_forward_size, read.post_forward_group)
    return full_parameter(_EAGER, collectives.wait_tensor(message), read, start=0, span=read.extent).clone()


@unshard_post_forward.register_fake
def _(part: torch.Tensor, spec: str) -> torch.Tensor:
    return part.new_empty(parse(spec).shape)


OWN_PART = torch.ops.fsdp.post_forward_part.default
SHARD_POST_FORWARD = torch.ops.fsdp.shard_post_forward.default
UNSHARD_POST_FORWARD = torch.ops.fsdp.unshard_post_forward.default
