"""Collectives that fail in compiled graphs, and worlds that are made again."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compile import RankFailedError, fully_shard
from fsdp_compile.comm import failures
from tests.models.kinds import WIDTH, Slim
from tests.ranks import run_ranks
from tests.two_sides import loss_of


def _left_alone(options: dict[str, Any]) -> str:
    """Rank 1 ends after a step; rank 0 begins another one."""
    compiled = torch.compile(Slim(), backend="fsdp", options={"bucket_mb": 0, "prefetch": "none", **options})
    compiled(torch.ones(2, WIDTH)).sum().backward()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "_ANSWER_S", 0.3)
        with pytest.raises(RankFailedError) as caught:
            compiled(torch.ones(2, WIDTH))
    return str(caught.value.where)


@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=[pytest.mark.long, pytest.mark.inductor])])
def test_the_collective_is_named(lower: str) -> None:
    said, _ = run_ranks(_left_alone, {"lower": lower}, timeout_s=100)
    assert said.startswith("rank 0, waiting for the all-gather of blocks.0.0.")
    assert " in a compiled forward of unit blocks.0" in said


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
