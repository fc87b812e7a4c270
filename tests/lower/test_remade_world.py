"""A world that is destroyed and made again in the same processes: its ranks agree anew."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from fsdp_compile import fully_shard
from tests.models.kinds import Slim
from tests.ranks import run_ranks
from tests.two_sides import loss_of


def _train(rows: int) -> None:
    model = fully_shard(Slim())
    compiled = torch.compile(model, backend="fsdp", dynamic=False, options={"lower": "eager", "prefetch": 1})
    loss_of(compiled(torch.ones(rows, 32))).backward()


def _in_two_worlds(port: int) -> bool:
    """In the second world rank 1 has to compile, and Dynamo has compiled in the first one what rank 0 needs."""
    rank = dist.get_rank()
    _train(4)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=2)
    _train(4 - rank)
    dist.barrier()
    return True


def test_a_rank_that_recompiles_in_a_remade_world_waits_for_nobody() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    assert run_ranks(_in_two_worlds, port, timeout_s=60) == [True, True]
