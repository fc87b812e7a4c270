"""A training program in which rank 1 has a fault, as torchrun starts it or one process for each rank without it.

    python program.py FAULT TIMEOUT_S    with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT

Each rank prints its process, and the time when it comes to the fault.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import fully_shard

FAULT, TIMEOUT_S = (*sys.argv[1:3], "", "")[:2]
LATER = 2
"""The step of faults that come when everything is compiled."""


def _has(fault: str) -> bool:
    """Whether this rank has a fault, which comes now."""
    if fault != FAULT:
        return False
    os.write(sys.stdout.fileno(), f"fault at {time.time()}\n".encode())  # at once: the other rank writes there, too
    return dist.get_rank() == 1


def _do(when: str) -> None:
    if _has(f"raises {when}"):
        raise ValueError("a row of this rank's data is broken")
    if _has(f"out of memory {when}"):
        torch.empty(2**60, dtype=torch.uint8)
    if _has(f"killed {when}"):
        os.kill(os.getpid(), signal.SIGKILL)
    if _has(f"stopped {when}"):
        os.kill(os.getpid(), signal.SIGSTOP)


class _Model(nn.Module):
    """With an operator behind its layers whose fake implementation may be broken."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor, order: Iterable[int]) -> torch.Tensor:
        for number in order:
            x = torch.tanh(self.layers[number](x))
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


def _options() -> dict[str, Any]:
    options: dict[str, Any] = {"lower": "eager"}
    if _has("wrong option"):
        options["prefetch"] = "nonsense"
    if _has("too small a budget"):
        options["memory_budget_gb"] = 1e-6
    return options


def _main() -> None:
    print(f"process {os.getpid()}", flush=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(TIMEOUT_S)))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = _Model()
    options = _options()
    _do("first")
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16 if _has("other setting") else None))
    run = torch.compile(model, backend="fsdp", options=options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        if step == LATER:
            if _has("leaves a step out"):
                continue
            _do("later")
        when = "first" if step == 0 else "later"
        other = step in (0, LATER) and _has(f"other order {when}")
        run(torch.ones(2, 8), (1, 0, 2) if other else (0, 1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    _main()
