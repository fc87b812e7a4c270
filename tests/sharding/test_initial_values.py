"""Ranks that shard models of different values are refused before the first forward, by the name of what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_compile.sharding.initial_values import hash_of
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import RankMismatchError, fully_shard
from tests import long
from tests.beside import compile_eagerly
from tests.models.extended import Half
from tests.models.kinds import WIDTH, Stack
from tests.ranks import run_ranks


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except (BackendCompilerFailed, RankMismatchError) as error:
        own = getattr(error, "inner_exception", error)
        return str(own) if isinstance(own, RankMismatchError) else repr(own)
    return ""


def _inputs() -> torch.Tensor:
    return torch.ones(2, WIDTH)


def _seeded_by_rank(how: str) -> list[str]:
    """The refusals of two calls: a refused model is not mixed by the next call either."""
    torch.manual_seed(dist.get_rank())
    model = Stack()
    call: Callable[[torch.Tensor], torch.Tensor] = model
    if how == "compiled":
        call = compile_eagerly(model)
    elif how == "function":
        call = compile_eagerly(lambda x: model(x + 0))
    else:
        if how == "bottom-up":
            for block in model.blocks:
                fully_shard(block)
        fully_shard(model)
        if how == "sharded-compiled":
            call = compile_eagerly(model)
    return [_refusal(lambda: call(_inputs())) for _ in range(2)]


@pytest.mark.core
@long.parametrize(
    "how",
    ["compiled", "function", "sharded", "sharded-compiled", "bottom-up"],
    always=["sharded", "bottom-up"],
)
def test_ranks_with_seeds_of_their_own_are_refused(how: str) -> None:
    for messages in run_ranks(_seeded_by_rank, how):
        for message in messages:
            assert "ranks start with different values of a parameter" in message
            assert "blocks.0.norm" not in message  # those are ones and zeros on every rank
            assert "weight, on rank 0 and rank 1\n" in message
            assert "sync_module_states=True" in message
            assert "same seed" in message


def _one_rank_differs(shape: tuple[int, ...]) -> str:
    model = Stack()
    if dist.get_rank() == 2:
        with torch.no_grad():
            model.head.bias[3] += 1e-6
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))
    return _refusal(lambda: model(_inputs()))


@long.parametrize("shape", [(3,), (2, 2)], always=[(2, 2)])
def test_the_parameter_and_the_ranks_are_named(shape: tuple[int, ...]) -> None:
    for message in run_ranks(_one_rank_differs, shape, world_size=torch.Size(shape).numel()):
        assert "head.bias, on rank 0 and rank 2\n" in message


def _of_a_class() -> str:
    """All values that differ are those of a class that says how it is gathered, and wraps them."""
    torch.manual_seed(dist.get_rank())
    model: Any = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8, bias=False))
    model[1].weight = nn.Parameter(Half(model[1].weight.detach()))
    return _refusal(lambda: fully_shard(model)(_inputs()))


def test_values_of_wrapping_classes_are_compared() -> None:
    for message in run_ranks(_of_a_class):
        assert "1.weight, on rank 0 and rank 1\n" in message


def _buffer_from_meta() -> str:
    """PyTorch's own way from meta to values, where ranks of uneven shards draw different amounts of random numbers."""
    with torch.device("meta"):
        model = Stack()
        model.register_buffer("table", torch.empty(3))
    fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        model.table.fill_(dist.get_rank())  # type: ignore[operator]
    return _refusal(lambda: model(_inputs()))


def test_buffers_that_get_their_values_after_sharding_are_not_compared() -> None:
    assert run_ranks(_buffer_from_meta) == ["", ""]


def _buffers(*, persistent: bool) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.register_buffer("table", torch.full((3,), float(dist.get_rank())), persistent=persistent)
    call = compile_eagerly(model)
    return _refusal(lambda: call(torch.ones(2, 4)))


@pytest.mark.long
def test_buffers_of_checkpoints_are_compared() -> None:
    for message in run_ranks(_buffers, persistent=True):
        assert "different values of a buffer" in message
        assert "table, on rank 0 and rank 1" in message
    assert run_ranks(_buffers, persistent=False) == ["", ""]


def _loaded(how: str) -> float:
    """The largest error of a forward after values were loaded into shards that were of no use."""
    torch.manual_seed(0)
    reference = Stack()
    torch.manual_seed(dist.get_rank() + 1)
    model = Stack()
    fully_shard(model)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            if how == "copy":
                mine.copy_(torch.distributed.tensor.distribute_tensor(theirs, mine.device_mesh))  # type: ignore[attr-defined]
            else:
                mine.to_local().copy_(theirs.chunk(2)[dist.get_rank()])  # type: ignore[attr-defined]
    return (model(_inputs()) - reference(_inputs())).abs().max().item()


@long.parametrize("how", ["copy", "local"], always=["local"])
def test_values_that_are_loaded_before_the_first_forward_count(how: str) -> None:
    assert max(run_ranks(_loaded, how)) < 1e-5


def _trained_apart() -> str:
    """After the first forward nothing is compared: batch norms have statistics of their own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    call = compile_eagerly(model)
    for step in range(2):
        call(torch.randn(3, 4, generator=torch.Generator().manual_seed(5 * step + dist.get_rank()))).sum().backward()
    model.eval()
    return _refusal(lambda: call(torch.ones(2, 4)))


@pytest.mark.long
def test_nothing_is_compared_later() -> None:
    assert run_ranks(_trained_apart) == ["", ""]


def test_a_hash_tells_values_apart() -> None:
    values = torch.randn(1031)
    others = [values.clone() for _ in range(4)]
    others[0][7] = torch.nextafter(values[7], torch.tensor(9.0))
    others[1][[0, 1]] = values[[1, 0]]
    others[2][1030] += 1
    others[3] = values.flip(0)
    hashes = [hash_of(each) for each in (values, *others, values[:-1])]
    assert len({int(h) for h in hashes if h is not None}) == 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int8])
def test_a_hash_does_not_depend_on_where_a_value_lies(dtype: torch.dtype) -> None:
    value = torch.randn(4, 3, 5, 8).to(dtype)
    around = torch.zeros(value.numel() + 3, dtype=dtype)
    around[3:] = value.reshape(-1)
    for same in (value.to(memory_format=torch.channels_last), around[3:].view(value.shape), nn.Parameter(value, False)):  # noqa: FBT003
        assert hash_of(same) == hash_of(value)


def test_a_hash_of_a_wrapping_class_is_of_what_it_wraps() -> None:
    values = torch.randn(5, 3)
    assert hash_of(Half(values)) == hash_of(Half(values.clone()))
    assert hash_of(Half(values)) != hash_of(Half(values + 1))
    assert hash_of(Half(values.to("meta"))) is None


def test_what_has_no_value_has_no_hash() -> None:
    assert hash_of(None) is None
    assert hash_of(torch.empty(3, device="meta")) is None
    assert hash_of(torch.ones(3).to_sparse()) is None
    assert hash_of(torch.empty(0)) is not None
