"""Reductions that users register: in the graph, once per unit, for every kind of sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import ConfigError, fully_shard, no_sync, register_comm_hook, units
from fsdp_compile.ir.graph import Role
from fsdp_compile.lower.region import regions_of
from tests import long
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Slim, Stack
from tests.numerics.one_process.measure import Differences, OneOfTwo, batches, train_pair
from tests.numerics.one_process.test_mixed_precision import BF16, ByHand, train_both
from tests.ranks import on_ranks
from tests.two_sides import MIXED, Averaging, close, compile_eagerly, loss_of, made, mesh_of, whole


def _operators(model: nn.Module, role: Role) -> list[str]:
    return [str(node.target) for ran in regions_of(units(model)) for step in ran.steps for node in step.nodes(role)]


@pytest.mark.core
@long.parametrize(
    ("strategy", "world_size"),
    [
        (ShardingStrategy.FULL_SHARD, 1),
        (ShardingStrategy.FULL_SHARD, 2),
        (ShardingStrategy.NO_SHARD, 2),
        (ShardingStrategy.HYBRID_SHARD, 4),
    ],
    always=[(ShardingStrategy.FULL_SHARD, 1), (ShardingStrategy.FULL_SHARD, 2)],
)
@on_ranks(world_size=lambda world_size, **_: world_size)
def test_a_hook_is_the_reduction_of_each_unit(strategy: ShardingStrategy, world_size: int) -> None:
    """Once per unit and step, the hook gets the whole flat gradient; replicas alone, and one rank, have no output."""
    hybrid = strategy is ShardingStrategy.HYBRID_SHARD
    mesh = mesh_of((2, 2) if hybrid else (world_size,))
    hook = Averaging(mesh.get_group(1) if hybrid else None)
    models: list[nn.Module] = []

    def prepare(model: nn.Module) -> None:
        models.append(fully_shard(model, mesh=mesh, sharding_strategy=strategy))
        register_comm_hook(model, hook, "mine")

    train_pair(Slim, prepare=prepare, steps=2, within=Differences(1e-6, 1e-4, 0.02))
    sizes = [group.flat.numel() for unit in units(models[0]) for group in unit.groups]
    whole = strategy is ShardingStrategy.NO_SHARD or world_size == 1
    operators = _operators(models[0], Role.REPLICATE if whole else Role.REDUCE)
    assert len(operators) == len(sizes)
    assert all(operator.startswith("fsdp_compile.hook") for operator in operators)
    wanted = [("mine", size, -1) if whole else ("mine", 2 * size, size) for size in sizes]
    assert sorted(hook.calls) == sorted(wanted * 2)


@pytest.mark.long
@pytest.mark.core
@pytest.mark.parametrize("state", [False, True])
@on_ranks()
def test_bf16_compress_is_a_cast_in_the_graph(state: bool) -> None:  # noqa: FBT001
    def prepare(model: nn.Module) -> None:
        fully_shard(model)
        made = default_hooks.LowPrecisionState(dist.group.WORLD) if state else None
        register_comm_hook(model, default_hooks.bf16_compress_hook, made)
        groups = [group for unit in units(model) for group in unit.groups]
        assert all(param.spec.reduce_dtype is BF16 for group in groups for param in group.params)

    assert train_both(Stack, prepare, ByHand(lambda m: m, torch.float32, BF16)) == 0.0


@on_ranks()
def test_torchs_hooks_are_ordinary_nodes() -> None:
    for hook, dtype in (
        (default_hooks.fp16_compress_hook, torch.float16),
        (default_hooks.reduce_scatter_hook, torch.float32),
    ):
        model = fully_shard(Stack(1))
        register_comm_hook(model, hook)
        compile_eagerly(model)(torch.ones(2, WIDTH)).sum().backward()
        (backward,) = (step for ran in regions_of(units(model)) for step in ran.steps[1:])
        for node in backward.nodes(Role.REDUCE):
            assert "reduce_scatter_tensor_coalesced" in str(node.target)
            assert {message.meta["val"].dtype for message in node.all_input_nodes} == {dtype}


SUMS = [
    (ShardingStrategy.FULL_SHARD, "set_requires_gradient_sync", 2),
    (ShardingStrategy.HYBRID_SHARD, "set_requires_all_reduce", 4),
    (ShardingStrategy.NO_SHARD, "set_requires_all_reduce", 4),
]


@long.parametrize(("strategy", "waits", "world_size"), SUMS, always=SUMS[:2])
@on_ranks(world_size=lambda world_size, **_: world_size)
def test_compressed_gradients_accumulate_in_their_own_dtype(
    strategy: ShardingStrategy, waits: str, world_size: int
) -> None:
    """A sum that bfloat16 holds, of numbers that it cannot add one by one."""
    mesh = mesh_of((2, world_size // 2) if strategy is ShardingStrategy.HYBRID_SHARD else (world_size,))
    model: Any = fully_shard(nn.Linear(1, 4, bias=False), mesh=mesh, sharding_strategy=strategy)
    register_comm_hook(model, default_hooks.bf16_compress_hook)
    call = compile_eagerly(model)
    gradients = [2048.0, 8.0, 8.0]
    for number, each in enumerate(gradients):
        getattr(model, waits)(number == 2)
        call(torch.full((1, 1), each)).sum().backward()
    assert model.weight.grad.full_tensor().flatten().tolist() == [sum(gradients)] * 4
    for ran in regions_of(units(model)):
        for node in (node for step in ran.steps for role in (Role.REDUCE, Role.REPLICATE) for node in step.nodes(role)):
            assert {message.meta["val"].dtype for message in node.all_input_nodes} == {BF16}


@pytest.mark.long
@on_ranks()
def test_what_no_microbatch_reduces_is_compressed_at_the_end() -> None:
    """The microbatch that reduces does not use a layer: its gradients are reduced at the end of the backward."""
    model: Any = OneOfTwo(1, 4, bias=False)
    for module in (model.first, model.second, model):
        fully_shard(module)
    register_comm_hook(model, default_hooks.bf16_compress_hook)
    call = compile_eagerly(model)
    with no_sync(model):
        for each in (2048.0, 8.0, 8.0):
            call(torch.full((1, 1), each)).sum().backward()
    model.chosen = "second"
    call(torch.ones(1, 1)).sum().backward()
    assert model.first.weight.grad.full_tensor().flatten().tolist() == [2064.0] * 4


@pytest.mark.long
@on_ranks()
def test_a_state_of_ones_own_is_honoured() -> None:
    """A state that divides otherwise is honoured: the hook then runs as it is."""
    model, plain = (fully_shard(made(lambda: Stack(1))) for _ in range(2))
    state = default_hooks.DefaultState(dist.distributed_c10d._get_default_group())
    state.gradient_postdivide_factor *= 4
    register_comm_hook(model, default_hooks.reduce_scatter_hook, state)
    (batch,) = batches(1, 4)
    for each in (model, plain):
        loss_of(compile_eagerly(each)(batch)).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        close(4 * whole(mine.grad), whole(theirs.grad), "gradient", (0.0, 1e-6))


@pytest.mark.long
@on_ranks()
def test_under_inductor() -> None:
    def prepare(model: nn.Module) -> None:
        register_comm_hook(fully_shard(model), Averaging(), "mine")

    train_pair(Slim, lower="inductor", steps=2, prepare=prepare, within=Differences(1e-5, 1e-4, 0.02))


@on_ranks()
def test_the_gradient_comes_in_the_reductions_dtype() -> None:
    seen = []

    def hook(_: object, gradient: torch.Tensor, output: torch.Tensor) -> None:
        seen.append((gradient.dtype, output.dtype))
        dist.reduce_scatter_tensor(output, gradient)

    compiled = compile_eagerly(fully_shard(Stack(1), mp_policy=MIXED))
    register_comm_hook(compiled, hook)
    loss_of(compiled(torch.ones(2, WIDTH))).backward()
    assert set(seen) == {(torch.float32, torch.float32)}


def _nothing(_state: object, _gradient: torch.Tensor, _output: torch.Tensor) -> None: ...


def _refusal(call: Callable[[], object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call()
    return caught.value


def test_wrong_use_is_refused() -> None:
    with fake_world(4):
        model: Any = Stack(2)
        assert "not sharded" in _refusal(lambda: register_comm_hook(model, _nothing)).what
        fully_shard(model.blocks[0])
        fully_shard(model)
        assert "cannot be called" in _refusal(lambda: register_comm_hook(model, "hook")).what  # type: ignore[arg-type]
        assert "with 3 arguments" in _refusal(lambda: register_comm_hook(model, lambda _, gradient: None)).what  # noqa: ARG005
        assert "with 3 arguments" in _refusal(lambda: register_comm_hook(model, default_hooks.allreduce_hook)).what
        units(model)  # only then does FSDP2 know which module is the outermost
        assert "a part of a sharded model" in _refusal(lambda: register_comm_hook(model.blocks[0], _nothing)).what
        register_comm_hook(model, _nothing)
        error = _refusal(lambda: register_comm_hook(model, _nothing))
        assert "has a communication hook already" in error.what
        assert "Stack)" in (error.where or "")


def test_no_hook_divides_beside_a_factor() -> None:
    with fake_world(4):
        for hook in (default_hooks.reduce_scatter_hook, _nothing):
            model: Any = fully_shard(nn.Linear(WIDTH, 2))
            model.set_gradient_divide_factor(1.0)
            assert "a divide factor is set" in _refusal(lambda: register_comm_hook(model, hook)).what  # noqa: B023
