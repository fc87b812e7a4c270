"""Replica groups that torchft manages, each sharded within by this package: one is lost, the other goes on without it.

    torchrun --nproc-per-node 2 -m tests.integrations.programs.with_torchft GROUP TOGETHER DIES_AFTER FOLDER

Each torchrun is one replica group. Group 1 comes when group 0 has made a step, and gets its state. After DIES_AFTER
steps that both made together a rank of group 1 is killed; started again, the group gets the state once more. Both end
after TOGETHER steps that they have made together.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torchft import Manager, ProcessGroupGloo

import fsdp_compile

GROUPS, RANKS = 2, 2
ROWS = 4
TIMEOUT = timedelta(seconds=10)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def batch(step: int, group: int, rank: int) -> torch.Tensor:
    """The rows of one rank."""
    seed = (step * GROUPS + group) * RANKS + rank
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(seed))


def average(manager: Manager, model: nn.Module) -> None:
    """Averages this rank's part of each gradient over the replica groups that take part, in one message."""
    gradients = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
    message = torch.cat([gradient.reshape(-1) for gradient in gradients])
    manager.allreduce(message).wait()
    for gradient, part in zip(gradients, message.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


class State:
    """What a group that joins gets from another one: of each rank, the parts of the rank with its number.

    Attributes:
        together: Steps that all groups have made together.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.together = 0

    def get(self) -> dict[str, Any]:
        """This rank's parts."""
        held = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "together": self.together}
        local: dict[str, Any] = tree_map_only(DTensor, lambda value: value.to_local().clone(), held)
        return local

    def set(self, given: dict[str, Any]) -> None:
        """Takes the parts of another group's rank."""
        self.together = given["together"]
        for name, value in self.model.state_dict().items():
            value.to_local().copy_(given["model"][name])
        optimizer = given["optimizer"]
        for parameter, values in zip(self.model.parameters(), optimizer["state"].values(), strict=True):
            assert isinstance(parameter, DTensor)
            for key in ("exp_avg", "exp_avg_sq"):
                values[key] = DTensor.from_local(
                    values[key],
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
        self.optimizer.load_state_dict(optimizer)


def main(group: int, together: int, dies_after: int, folder: Path) -> None:
    """Trains, and writes which groups took part in each step, and the parameters at the end."""
    while group == 1 and not (folder / "begun").exists():
        time.sleep(0.1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    model = fsdp_compile.fully_shard(make_model())
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    optimizer = make_optimizer(model)
    state = State(model, optimizer)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=state.set,
        state_dict=state.get,
        min_replica_size=1,
        replica_id=f"group_{group}",
        hostname="localhost",
        timeout=TIMEOUT,
        init_sync=False,  # all groups make the same model
    )
    is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    made: list[dict[str, float]] = []
    while state.together < together:
        step = manager.current_step()
        manager.start_quorum()
        optimizer.zero_grad()
        loss = compiled(batch(step, group, rank)).square().mean()
        loss.backward()
        if (group, rank, state.together, is_first_start) == (1, 1, dies_after, True):
            os.kill(os.getpid(), signal.SIGKILL)
        average(manager, model)
        if not manager.should_commit():
            continue  # a group was lost in this step: it is made again, without it
        optimizer.step()
        groups = manager.num_participants()
        state.together += groups == GROUPS
        made.append({"step": step, "groups": groups, "time_s": time.time()})
        (folder / "begun").touch()
        if groups < GROUPS:
            time.sleep(0.2)  # there are fewer steps to look at until the other group is back
    with fsdp_compile.full_params(model, writeback=False, rank0_only=True):
        if rank == 0:
            torch.save(model.state_dict(), folder / f"trained-{group}.pt")
            (folder / f"steps-{group}.json").write_text(json.dumps(made))
    dist.barrier()
    manager.shutdown(wait=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
