"""The marker for an all-gather that an all-gather extension asks for: `fsdp_compile::gather_message`.

Passes that choose what is saved for backward see by it what is made of shards alone. Behind them it is replaced by the
functional collective and its wait.
"""

from __future__ import annotations

import torch

from fsdp_compile._torch.distributed import collectives


@torch.library.custom_op("fsdp_compile::gather_message", mutates_args=())
def gather_message(message: torch.Tensor, size: int, group: str, spec: str) -> torch.Tensor:  # noqa: ARG001  spec: the passes'
    """Gathers one message.

    Args:
        message: `[n]`.
        size: Ranks in the group.
        group: torch's name of the group.
        spec: Text of the `UnshardSpec` of the parameter.

    Returns:
        `[size * n]`, rank after rank.
    """
    return collectives.wait_tensor(collectives.all_gather_into_tensor(message, size, group))


@gather_message.register_fake
def _(message: torch.Tensor, size: int, group: str, spec: str) -> torch.Tensor:  # noqa: ARG001
    return message.new_empty(message.shape[0] * size)


GATHER_MESSAGE = torch.ops.fsdp_compile.gather_message.default
