"""A training program, one process for each rank and no launcher, in which rank 1 has a fault.

    python program.py FAULT WAY TIMEOUT_S    with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT

WAY is "compiled" or "uncompiled". It prints the time of the fault, and when and by what this rank has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import fully_shard

FAULT, WAY, TIMEOUT_S = (*sys.argv[1:4], "", "", "")[:3]
OPTIONS: Any = {"lower": "eager"}
LATER = 2
"""The step of faults that come when everything is compiled."""


def _has(fault: str) -> bool:
    """Whether this rank has a fault, which comes now."""
    if fault != FAULT:
        return False
    print(f"fault at {time.time()}", flush=True)
    return dist.get_rank() == 1


def _do(when: str) -> None:
    if _has(f"raises {when}"):
        raise ValueError("a row of this rank's data is broken")
    if _has(f"killed {when}"):
        os.kill(os.getpid(), signal.SIGKILL)
    if _has(f"stopped {when}"):
        os.kill(os.getpid(), signal.SIGSTOP)


class _Model(nn.Module):
    """With an operator between its layers whose fake implementation may be broken."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.ops.faults.same(x)


@torch.library.custom_op("faults::same", mutates_args=())
def _same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@_same.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    if _has("broken fake"):
        raise AttributeError("this fake implementation is broken")
    return torch.empty_like(x)


torch.library.register_autograd("faults::same", lambda _, grad: grad)


def _main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(TIMEOUT_S)))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = _Model()
    options = {**OPTIONS, "prefetch": "nonsense"} if _has("wrong option") else OPTIONS
    _do("first")
    run = torch.compile(model, backend="fsdp", options=options) if WAY == "compiled" else fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        if step == LATER:
            if _has("leaves a step out"):
                continue
            _do("later")
        run(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    _main()
