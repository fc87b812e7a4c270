"""Shards on the host: right where the host computes, too, and refused by name where they cannot be."""

from __future__ import annotations

import copy
import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_compile.runtime import post_backward
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import fsdp_compile
from fsdp_compile import ConfigError, fully_shard
from fsdp_compile.config.policy import Offload, as_offload, compute_device, host_buffer, refuse_device
from fsdp_compile.ir.graph import Role
from fsdp_compile.lower.compiled_regions import regions_of
from fsdp_compile.sharding import allocate
from tests.delayed_copies import ON_SUCH_A_HOST, delayed_copies
from tests.fake_world import fake_world
from tests.models.kinds import Stack
from tests.numerics.one_process.pair import Differences, train_pair
from tests.ranks import run_ranks


def _offloaded() -> list[Differences]:
    """FSDP1's policy as an option, FSDP2's as an argument."""
    policy, options = CPUOffloadPolicy(), {"offload_policy": CPUOffload(offload_params=True)}
    return [
        train_pair(Stack, options=options, clip=0.5, steps=2),
        train_pair(Stack, prepare=lambda model: fully_shard(model, offload_policy=policy), clip=0.5, steps=2),
    ]


@pytest.mark.long
@pytest.mark.core
def test_the_host_trains_to_the_numbers_of_one_process() -> None:
    for rank in run_ranks(_offloaded, world_size=2):
        for found in rank:
            assert found.loss < 1e-6
            assert found.gradient < 1e-4
            assert found.parameter < 0.02


@dataclasses.dataclass(frozen=True)
class _Trained:
    """What two backwards without no_sync() and a step left on one rank.

    Attributes:
        gradients: Whether gradients are the sums of both, as in one process: FSDP1 keeps the last one only.
        norm: Whether the norm is that of one process.
        copied: Bytes of each copy that the graphs made between host and device.
        nodes: Copies in the graphs: into the device and out of it in forward, the same in backward.
        on_host: Shards that were allocated on the host, in elements.
        devices: Of optimizer state and of what `state_dict()` has.
    """

    gradients: bool
    norm: bool
    norm_device: str
    copied: list[int]
    nodes: list[int]
    on_host: list[int]
    devices: set[torch.device]


def _accumulated() -> _Trained:
    torch.manual_seed(0)
    model = nn.Linear(8, 4, bias=False)
    reference = copy.deepcopy(model)
    # On the CPU alone nothing tells host from device, but the copies, and who allocates a shard.
    with delayed_copies() as copied:
        with mock.patch.object(allocate, "host_buffer", wraps=host_buffer) as allocated:
            fully_shard(model, offload_policy=ON_SUCH_A_HOST)
        compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
        world, rank = dist.get_world_size(), dist.get_rank()
        for step in range(2):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            compiled(batch.chunk(world)[rank]).square().mean().backward()
            reference(batch).square().mean().backward()
    steps = [step for region in regions_of(fsdp_compile.units(model)) for step in region.steps]
    nodes = [sum(1 for _ in step.nodes(role)) for step in steps for role in (Role.OFFLOAD_IN, Role.OFFLOAD_OUT)]
    assert reference.weight.grad is not None
    assert isinstance(model.weight.grad, DTensor)
    gradients = torch.allclose(model.weight.grad.full_tensor(), reference.weight.grad, rtol=1e-5)
    norm = fsdp_compile.clip_grad_norm_(model, 1e9)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    state = [v.device for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    state += [v.device for v in model.state_dict().values()]
    return _Trained(
        gradients,
        torch.allclose(norm, expected, rtol=1e-5),
        norm.device.type,
        list(copied),
        nodes,
        [call.args[0] for call in allocated.call_args_list],
        set(state),
    )


def test_gradients_add_up_and_norm_state_and_checkpoints_stay_on_the_host() -> None:
    torch.manual_seed(0)
    for rank in run_ranks(_accumulated, world_size=2):
        assert rank.gradients
        assert rank.norm
        assert rank.norm_device == "cpu"
        assert rank.devices == {torch.device("cpu")}
        assert rank.on_host == [64]  # 2 of 4 rows of 8, aligned
        assert rank.nodes == [1, 0, 0, 1]
        assert rank.copied == [256, 256] * 2  # in each step the shard goes in, and its gradient out, aligned


def test_policies_of_both_fsdps_are_understood() -> None:
    assert as_offload(CPUOffloadPolicy()) == Offload(pinned=True)
    assert as_offload(CPUOffloadPolicy(pin_memory=False)) == Offload(pinned=False)
    assert as_offload(CPUOffload(offload_params=True)) == Offload(pinned=True)
    assert as_offload(CPUOffload(offload_params=False)) is None


def test_copies_are_for_shards_that_live_elsewhere_than_they_are_used() -> None:
    assert compute_device(Offload(pinned=True), "cuda") == "cuda"
    assert compute_device(Offload(pinned=True), "cpu") == ""
    assert compute_device(None, "cuda") == ""


def test_pinning_without_a_device_is_refused() -> None:
    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=False),
        pytest.raises(ConfigError, match="pin_memory=False"),
    ):
        host_buffer(32, torch.float32, Offload(pinned=True))
    assert host_buffer(32, torch.float32, Offload(pinned=False)).tolist() == [0.0] * 32


@pytest.mark.core
def test_a_model_on_the_cpu_and_a_mesh_of_gpus_need_a_policy() -> None:
    """FSDP2 moves such a model as a whole; here the rank's part alone moves, if that is asked for."""
    with fake_world(2):
        mesh = init_device_mesh("cuda", (2,))
        model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Sequential(nn.Linear(4, 4)))
        with pytest.raises(ConfigError, match=r"1\.0\.weight is on the CPU, .* on cuda") as caught:
            fully_shard(model, mesh=mesh)
        where, instead = str(caught.value.where), str(caught.value.instead)
        assert "Sequential" in where
        for way in ('model.to("cuda")', "device_id=torch.cuda.current_device()", "offload_policy=CPUOffloadPolicy()"):
            assert way in instead
        assert not isinstance(model[1][0].weight, DTensor), "nothing was sharded"  # type: ignore[index]
        with pytest.raises(ConfigError, match="is on the CPU"):
            fully_shard(nn.Linear(4, 4), mesh=mesh, offload_policy=CPUOffload(offload_params=False))
        # These make tensors on the device, which is not there.
        with mock.patch.object(post_backward, "install_grad_accumulators"):
            on_host = fully_shard(nn.Linear(4, 4), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        assert on_host.weight.to_local().device.type == "cpu"  # type: ignore[attr-defined]
        fully_shard(model, mesh=mesh, ignored_params=set(model[1].parameters()))


def test_moving_an_offloaded_parameter_to_the_device_is_refused() -> None:
    refuse_device("weight", torch.device("cpu"))
    with pytest.raises(ConfigError, match="leave the model on the CPU") as caught:
        refuse_device("weight", torch.device("cuda", 0))
    assert "cuda:0" in str(caught.value)
    assert "weight" in str(caught.value)


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
        assert all(unit.param_groups[0].flat_param.is_pinned() for unit in fsdp_compile.units(model))
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
