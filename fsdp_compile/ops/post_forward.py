"""Post-forward shards: each rank saves 1/k of a parameter for backward (`reshard_after_forward=k`).

The ranks of a shard group form runs of k neighbours. A gathered message, rank after rank, falls into k equal parts; the
i-th rank of each run saves the i-th part, and backward gathers over the k ranks of a run. The parts come in rank order,
so the message in backward is that of forward.

    fsdp_compile.post_forward_part(message, k, group)     this rank's part of a gathered message
    fsdp_compile.shard_post_forward(full, spec)           the marker for it in a captured graph
    fsdp_compile.unshard_post_forward(part, spec)         the marker for the all-gather of the parts
"""

from __future__ import annotations

import torch

from fsdp_compile._torch.distributed import collectives, resolve_group
from fsdp_compile.layout.messages import EAGER, full_parameter, gradient_rows
from fsdp_compile.layout.spec import parse


@torch.library.custom_op("fsdp_compile::post_forward_part", mutates_args=())
def post_forward_part(message: torch.Tensor, parts: int, group: str) -> torch.Tensor:
    """Copies this rank's part, `[numel / parts]`, out of a gathered message; `group` has `parts` ranks."""
    held = resolve_group(group)
    assert held is not None
    # The rank is not an argument: graphs are alike on every rank. A clone, so that the message can be freed.
    return message.chunk(parts)[held.rank()].clone()


@post_forward_part.register_fake
def _(message: torch.Tensor, parts: int, group: str) -> torch.Tensor:  # noqa: ARG001
    return message.new_empty(message.shape[0] // parts)


@torch.library.custom_op("fsdp_compile::shard_post_forward", mutates_args=())
def shard_post_forward(full: torch.Tensor, spec: str) -> torch.Tensor:
    """This rank's part of a full parameter, `[post_forward_numel]`, padding included."""
    read = parse(spec)
    message = gradient_rows(EAGER, full, read).reshape(-1)  # the rows of each rank, as they are gathered
    return torch.ops.fsdp_compile.post_forward_part(message, read.post_forward_size, read.post_forward_group)


@shard_post_forward.register_fake
def _(full: torch.Tensor, spec: str) -> torch.Tensor:
    return full.new_empty(parse(spec).post_forward_numel)


@torch.library.custom_op("fsdp_compile::unshard_post_forward", mutates_args=())
def unshard_post_forward(part: torch.Tensor, spec: str) -> torch.Tensor:
    """Gathers a full parameter out of the parts of a run of ranks, `[post_forward_numel]` each."""
    read = parse(spec)
    message = collectives.all_gather_into_tensor(part, read.post_forward_size, read.post_forward_group)
    return full_parameter(EAGER, collectives.wait_tensor(message), read, start=0, span=read.extent).clone()


@unshard_post_forward.register_fake
def _(part: torch.Tensor, spec: str) -> torch.Tensor:
    return part.new_empty(parse(spec).shape)


OWN_PART = torch.ops.fsdp_compile.post_forward_part.default
SHARD_POST_FORWARD = torch.ops.fsdp_compile.shard_post_forward.default
UNSHARD_POST_FORWARD = torch.ops.fsdp_compile.unshard_post_forward.default
