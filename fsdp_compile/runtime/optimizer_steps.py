"""What steps of optimizers write, counted as torch counts other writes: its foreach kernels leave out DTensors.

Each parameter is counted by itself. One counter of all steps would tell a rank that trains a plain model of its own (a
probe of features) to gather sharded parameters again, alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

OWN_PARAMS = "_fsdp_own_params"
"""Attribute of an optimizer whose groups show other tensors while it steps (`flat_step`): each group's parameters.

None in an update in backward, which steps one flat parameter after the other and counts each by itself.
"""


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer, also while its groups show other tensors."""
    lists = vars(optimizer).get(OWN_PARAMS)
    if lists is None:
        lists = [group["params"] for group in optimizer.param_groups]
    return [parameter for parameters in lists for parameter in parameters]


@functools.cache
def count_optimizer_steps() -> None:
    """Starts to count the steps of every optimizer of the process, by the versions of its sharded parameters."""
    register_optimizer_step_post_hook(_count)


def _count(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    written = [parameter for parameter in parameters_of(optimizer) if isinstance(parameter, DTensor)]
    torch.autograd.graph.increment_version(written)
