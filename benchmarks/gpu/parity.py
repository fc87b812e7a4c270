"""Whether `fsdp_compile` trains on a device as FSDP2 does: losses and parameters after a few steps, in one world.

Both run in the same emulated world, whose collectives are deterministic, so their shards can be compared directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks import contenders
from benchmarks.contenders import Setup
from benchmarks.models import Task
from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.wire import Link

Prepare = Callable[[nn.Module, Setup], Any]


def run(task: Task, setup: Setup, *, ranks: int, steps: int = 3) -> dict[str, Any]:
    """Trains both with AdamW.

    Args:
        task: What is trained.
        setup: Device and dtypes.
        ranks: Emulated ranks.
        steps: Optimizer steps.

    Returns:
        Losses, and the largest differences of losses and of parameters.
    """
    with emulated_world(ranks, Network(Link(bytes_per_s=1e15)), device=setup.device):
        torch.compiler.reset()
        expected, wanted = _train(contenders.fsdp2, task, setup, steps)
        losses, got = _train(contenders.ours, task, setup, steps)
    differences = [(got[name] - wanted[name]).abs().max().item() for name in wanted]
    return {
        "device": setup.device,
        "param_dtype": str(setup.param_dtype),
        "losses": losses,
        "fsdp2_losses": expected,
        "largest_loss_difference": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "largest_parameter_difference": max(differences),
    }


def _train(prepare: Prepare, task: Task, setup: Setup, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = task.make()
    called = prepare(model, setup)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = task.loss(task.forward(called))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: _local(parameter) for name, parameter in model.named_parameters()}


def _local(parameter: nn.Parameter) -> torch.Tensor:
    data = parameter.detach()
    return (data.to_local() if isinstance(data, DTensor) else data).float().cpu()
