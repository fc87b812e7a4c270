"""`sync_module_states=True`: every rank gets the values of the first one, which alone needs to have any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_compile import ConfigError, RankMismatchError, fully_shard, units
from fsdp_compile.comm import exchange
from tests import long
from tests.models.kinds import WIDTH, Stack
from tests.models.meta import Tied, initialize, tokens
from tests.ranks import run_ranks
from tests.sharding.test_materialize import assert_equal, full_state, on_meta


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("shard",) if len(shape) == 1 else ("replicate", "shard"))


def seeded(seed: int, make: Callable[[], nn.Module] = Tied) -> Any:
    """A model with the values of one seed, buffers and a channels-last weight included."""
    torch.manual_seed(seed)
    model = make()
    if isinstance(model, Tied):
        initialize(model)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(seed)
    model.image = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def assert_parts_equal(model: nn.Module, reference: nn.Module) -> None:
    """Bit by bit on this very rank, whatever other replicas hold: what one process would split over the mesh."""
    for unit in units(model):
        for slot in unit.params:
            module, attribute = slot.module_refs[0]
            name = next(n for n, m in model.named_modules() if m is module)
            full = getattr(reference.get_submodule(name), attribute)
            rows = full if slot.spec.dim is None else full.chunk(slot.spec.size, 0)
            mine = rows if slot.spec.dim is None else rows[slot.rank] if slot.rank < len(rows) else full[:0]
            assert torch.equal(slot.sharded_view, mine.detach()), (name, attribute)


def _check_alike(shape: tuple[int, ...], strategy: ShardingStrategy | None, chunk_bytes: int) -> None:
    model, reference = seeded(dist.get_rank()), seeded(0)
    with mock.patch.object(exchange, "CHUNK_BYTES", chunk_bytes):
        fully_shard(model, mesh=mesh_of(shape), sharding_strategy=strategy, sync_module_states=True)
    assert_parts_equal(model, reference)
    assert_equal(model, reference)
    assert model.head.weight is model.embedding.weight


@pytest.mark.core
@long.parametrize(
    ("shape", "strategy"),
    [((2,), None), ((2, 2), None), ((2,), ShardingStrategy.NO_SHARD), ((4,), None)],
    always=[((2, 2), None), ((2,), ShardingStrategy.NO_SHARD)],
)
def test_all_ranks_get_the_first_ones_values(shape: tuple[int, ...], strategy: ShardingStrategy | None) -> None:
    run_ranks(_check_alike, shape, strategy, exchange.CHUNK_BYTES, world_size=torch.Size(shape).numel())


def test_values_are_sent_in_chunks() -> None:
    run_ranks(_check_alike, (2, 2), None, 24, world_size=4)


def _sizes_sent() -> list[int]:
    """Bytes of each message while a model of a parameter of 40 kB is sharded."""
    sent: list[int] = []
    scatter, broadcast = dist.scatter, dist.broadcast

    def watched_scatter(piece: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(piece.nbytes * 2)
        return scatter(piece, *args, **kwargs)

    def watched_broadcast(value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(value.nbytes)
        return broadcast(value, *args, **kwargs)

    model = nn.Linear(100, 100)
    model.register_buffer("table", torch.ones(3000))
    with (
        mock.patch.object(exchange, "CHUNK_BYTES", 4096),
        mock.patch.object(dist, "scatter", watched_scatter),
        mock.patch.object(dist, "broadcast", watched_broadcast),
    ):
        fully_shard(model, sync_module_states=True)
    return sent


def test_no_message_is_larger_than_a_chunk() -> None:
    for sent in run_ranks(_sizes_sent):
        assert max(sent) <= 4096
        assert sum(sent) >= 100 * 100 * 4 + 3000 * 4
    assert exchange.CHUNK_BYTES == 250 * 1024 * 1024


def _check_first_rank_alone(shape: tuple[int, ...]) -> None:
    """Others build on meta; then all train one step as one process does."""
    is_first = dist.get_rank() == 0
    model = seeded(7) if is_first else on_meta(lambda: seeded(7))
    reference = seeded(7)
    fully_shard(model, mesh=mesh_of(shape), sync_module_states=True)
    assert_parts_equal(model, reference)
    assert_equal(model, reference)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    for forward, optimizer in zip((compiled, reference), optimizers, strict=True):
        forward(tokens()).square().mean().backward()
        optimizer.step()
    mine, theirs = full_state(model), full_state(reference)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, msg=name)


@pytest.mark.core
@long.parametrize("shape", [(2,), (2, 2)], always=[(2,)])
def test_the_first_rank_alone_has_values(shape: tuple[int, ...]) -> None:
    run_ranks(_check_first_rank_alone, shape, world_size=torch.Size(shape).numel())


class _Allocated(TorchDispatchMode):
    """Notes the largest tensor that any operator makes, in bytes; of a DTensor, only what is local is made."""

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
                self.most_bytes = max(self.most_bytes, tensor.untyped_storage().nbytes())
        return made


def _allocated() -> int:
    model = on_meta(lambda: nn.Linear(40, 40)) if dist.get_rank() else nn.Linear(40, 40)
    with _Allocated() as allocated:
        fully_shard(model, sync_module_states=True)
    return allocated.most_bytes


def test_no_other_rank_allocates_a_full_parameter() -> None:
    first, other = run_ranks(_allocated)
    full = 40 * 40 * 4
    assert first >= full
    assert full // 2 <= other < full


def _check_bottom_up() -> None:
    """Each call sends its own unit; and a model that is plain when it is compiled is sent, too."""
    is_first = dist.get_rank() == 0
    model = seeded(3) if is_first else on_meta(lambda: seeded(3))
    reference = seeded(3)
    for part in (model.blocks[0].norm, model.blocks[0].up, model.blocks[1]):
        fully_shard(part, sync_module_states=True)
    fully_shard(model, sync_module_states=True)
    assert_parts_equal(model, reference)
    assert_equal(model, reference)

    torch.manual_seed(dist.get_rank())
    plain = Stack()
    torch.manual_seed(0)
    reference = Stack()
    compiled = torch.compile(plain, backend="fsdp", options={"lower": "eager", "sync_module_states": True})
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(compiled(x), reference(x))
    assert_equal(plain, reference)


@pytest.mark.long
def test_bottom_up_and_at_the_first_compiled_call() -> None:
    run_ranks(_check_bottom_up)


def _normal(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.normal_()
    for buffer in module.buffers(recurse=False):
        buffer.random_(0, 100)


def _check_init_fn(shape: tuple[int, ...]) -> None:
    """Ranks draw different numbers; the first one's count. What has values there is sent, not initialized."""
    model, reference = on_meta(Tied), Tied()
    if dist.get_rank() == 0:
        torch.manual_seed(9)
        model.middle = nn.Linear(6, 6, bias=False, dtype=torch.bfloat16)
    torch.manual_seed(9)
    reference.middle = nn.Linear(6, 6, bias=False, dtype=torch.bfloat16)
    torch.manual_seed(dist.get_rank())
    fully_shard(model, mesh=mesh_of(shape), sync_module_states=True, param_init_fn=_normal)
    torch.manual_seed(0)
    with torch.no_grad():
        for module in reference.modules():
            if module is not reference.middle:
                _normal(module)
    assert_parts_equal(model, reference)
    assert_equal(model, reference)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_param_init_fn_fills_what_the_first_rank_lacks(shape: tuple[int, ...]) -> None:
    run_ranks(_check_init_fn, shape, world_size=torch.Size(shape).numel())


def _check_ignored() -> None:
    model = seeded(dist.get_rank())
    kept = model.blocks[0].up.weight
    fully_shard(model, ignored_params={kept}, sync_module_states=True)
    assert torch.equal(kept.detach(), seeded(dist.get_rank()).blocks[0].up.weight), "nothing ignored is sent"
    assert model.average.running_mean is not None
    assert torch.equal(model.average.running_mean, seeded(0).average.running_mean)


def test_ignored_parameters_are_not_sent() -> None:
    run_ranks(_check_ignored)


class Pair(torch.Tensor):
    """A tensor that consists of two."""

    def __new__(cls, first: torch.Tensor, _second: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]  # noqa: ANN001, ANN206
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def _check_inner_tensors() -> None:
    rank = dist.get_rank()
    model = nn.Linear(2, 2)
    model.register_buffer("pair", Pair(torch.full((3,), rank), torch.full((2, 2), rank + 5.0).t()))
    model.register_buffer("mask", torch.tensor([rank == 0, True]))
    fully_shard(model, sync_module_states=True)
    assert model.pair.first.tolist() == [0, 0, 0]  # type: ignore[union-attr, operator]
    assert model.pair.second.tolist() == [[5.0, 5.0], [5.0, 5.0]]  # type: ignore[union-attr, operator]
    assert model.mask.tolist() == [True, True]  # type: ignore[operator]


def test_tensors_inside_of_buffers_are_sent() -> None:
    run_ranks(_check_inner_tensors)


def _check_mismatches() -> list[str]:
    is_first = dist.get_rank() == 0
    messages = []
    for model in (
        nn.Linear(4, 4 if is_first else 5),
        on_meta(lambda: nn.Linear(4, 4)) if is_first else nn.Linear(4, 4),
    ):
        with pytest.raises(RankMismatchError) as caught:
            fully_shard(model, sync_module_states=True)
        messages.append(str(caught.value))
        assert not units(model), "nothing was sharded"
    with pytest.raises(ConfigError, match="sync_module_states is 1"):
        fully_shard(nn.Linear(2, 2), sync_module_states=1)  # type: ignore[arg-type]
    return messages


def test_ranks_that_do_not_fit_together_are_refused_on_all() -> None:
    for different, missing in run_ranks(_check_mismatches):
        assert "different names, shapes" in different
        assert "the first rank has it on the meta device" in missing
        assert "weight" in missing
