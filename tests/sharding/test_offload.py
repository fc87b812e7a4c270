"""Shards on the host: FSDP1's and FSDP2's policies, what stays there, and training with a GPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

import fsdp_compile
from fsdp_compile import fully_shard
from fsdp_compile.config.policy import as_offload
from tests.models.kinds import Stack
from tests.ranks import on_ranks
from tests.two_sides import WithOneProcess, compare_gradients


def test_policies_of_both_fsdps_are_understood() -> None:
    for policy in (CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False), OffloadPolicy()):
        assert as_offload(policy) is policy
    assert as_offload(CPUOffload(offload_params=True)) == CPUOffloadPolicy()
    assert as_offload(CPUOffload(offload_params=False)) == OffloadPolicy()
    assert as_offload(None) == OffloadPolicy()


@on_ranks()
def test_gradients_add_up_and_norm_state_and_checkpoints_stay_on_the_host() -> None:
    shard = functools.partial(fully_shard, offload_policy=CPUOffloadPolicy(pin_memory=False))
    pair = WithOneProcess(lambda: nn.Linear(8, 4, bias=False), shard=shard, shape=8, twice=False)
    for _ in range(2):  # FSDP1 keeps the last gradient only
        pair.backward()
    compare_gradients(pair.model, pair.reference, within=(1.3e-6, 1e-5))
    model = pair.model
    norm = fsdp_compile.clip_grad_norm_(model, 1e9)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(pair.reference.parameters(), 1e9))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    state: list[Any] = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    assert {v.device for v in [norm, *state, *model.state_dict().values()]} == {torch.device("cpu")}


@pytest.mark.optional
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_a_gpu_trains_from_pinned_shards(lower: str) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model, reference = Stack(), Stack()
        reference.load_state_dict(model.state_dict())
        reference.cuda()
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)), offload_policy=CPUOffloadPolicy())
        compiled = torch.compile(model, backend="fsdp", options={"lower": lower})
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
        for step in range(6):
            batch = torch.randn(64, 32, generator=torch.Generator().manual_seed(step)).cuda()
            loss, expected = compiled(batch).square().mean(), reference(batch).square().mean()
            torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
            loss.backward()
            expected.backward()
            if step % 2:  # two backwards are added on the host
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert mine.device.type == "cpu"
            torch.testing.assert_close(mine.full_tensor(), theirs.cpu(), rtol=1e-3, atol=1e-4)  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()
