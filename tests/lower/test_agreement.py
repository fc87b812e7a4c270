"""Ranks that compile different collectives are told so, all of them, before any of them hangs."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compile import RankMismatchError, fully_shard, units
from fsdp_compile.comm.groups import rank_store
from fsdp_compile.ir.calls import group_of, line_of, starts_of
from fsdp_compile.lower.region import regions_of
from fsdp_compile.passes.follow_order import CannotFollowError, FollowOrder
from tests import long
from tests.models.kinds import Slim
from tests.numerics.one_process.measure import gradient_difference
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import compile_eagerly, loss_of


class _OtherWay(Slim):
    """Rank 1 goes through the blocks backwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = list(self.blocks)
        for block in blocks[::-1] if dist.get_rank() == 1 else blocks:
            x = block(x)
        return self.head(x)


class _LessOnOne(Slim):
    """Rank 1 leaves the last block out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in list(self.blocks)[: 2 - dist.get_rank()]:
            x = block(x)
        return self.head(x)


def _refusal(model: nn.Module, *shape: int, what: str = "compile different collectives", **options: Any) -> str:
    """What this rank is told where ranks do not agree."""
    compiled = compile_eagerly(model, **options)
    with pytest.raises(Exception, match=what) as caught:
        loss_of(compiled(torch.ones(shape))).backward()
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, RankMismatchError)
    return str(error)


def _message(make: type[nn.Module]) -> str:
    return _refusal(make(), 4, 32, bucket_mb=0)


@pytest.mark.core
@pytest.mark.parametrize(
    ("make", "first", "second"), [(_OtherWay, "blocks.0.", "blocks.1."), (_LessOnOne, "blocks.1.", "head.")]
)
def test_every_rank_names_both_ranks_and_where_they_part(make: type[nn.Module], first: str, second: str) -> None:
    messages = run_ranks(_message, make)
    assert messages[0] == messages[1]
    assert "rank 0 and rank 1 compile different collectives" in messages[0]
    zero, one = messages[0].split("where: ")[1].split("instead:")[0].split(" on rank 0, ")
    assert "all_gather" in zero
    assert first in zero
    assert second in one
    assert "must not depend on a rank's number or data" in messages[0]


@on_ranks(timeout_s=60)
def test_ranks_may_look_up_different_numbers_of_rows() -> None:
    """Rank 1 looks up other numbers of rows than rank 0."""
    words = nn.Sequential(nn.Embedding(12, 32), nn.Linear(32, 12))
    compiled = compile_eagerly(words, dynamic=False, embedding="sharded")
    for rows in (4, 4, 4) if dist.get_rank() == 0 else (4, 3, 5):
        compiled(torch.arange(rows)).square().mean().backward()


class _Wide(nn.Module):
    """Layers that take about as long as their gradients' reduction, with some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2048, 256, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def _pairs() -> nn.Module:
    """Units with two large parameters each, which are split at the edges of the graph: which edge depends on rows."""
    pairs = (nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)) for _ in range(4))
    return nn.Sequential(nn.Linear(2048, 512), *pairs)


class _Left(nn.Module):
    """`W @ x`: backward reads the weight before the gradient that it is multiplied with."""

    def __init__(self, made: int, taken: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(made, taken) / taken**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight @ x.t()).t().tanh()


def _lefts() -> nn.Module:
    return nn.Sequential(_Left(256, 2048), *(_Left(*pair) for pair in ((512, 256), (256, 512)) * 4))


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """Ranks to shard over, or replicas of such ranks; FSDP2 asks for their names."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "fsdp")[-len(shape) :])


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The rows of each rank in each step, and how the ranks train."""

    rows: tuple[tuple[int, ...], ...]
    make: Callable[[], nn.Module] = _Wide
    mesh: tuple[int, ...] = (2,)
    dynamic: bool | None = None
    lower: str = "eager"


_Orders = dict[tuple[int, ...], set[tuple[str, ...]]]
"""By the ranks of a group, the orders in which its collectives run in a backward."""


def _with_rows(sizes: _Sizes) -> tuple[float, _Orders]:
    """Trains with other rows on each rank; also returns the largest difference from one process."""
    torch.manual_seed(0)
    model = sizes.make()
    reference = copy.deepcopy(model)
    mesh = _mesh(sizes.mesh)
    for part in model.children() if isinstance(model, nn.Sequential) else ():
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    options: dict[str, Any] = {"lower": sizes.lower, "bucket_mb": 0}
    compiled = torch.compile(model, backend="fsdp", dynamic=sizes.dynamic, options=options)
    worst, orders = 0.0, _Orders()
    for rows in zip(*sizes.rows, strict=True):
        every = [torch.randn(n, 2048, generator=torch.Generator().manual_seed(n)) for n in rows]
        loss_of(compiled(every[dist.get_rank()])).backward()
        torch.stack([loss_of(reference(batch)) for batch in every]).mean().backward()
        worst = max(worst, gradient_difference(model, reference))
        (region,) = regions_of(units(model))
        found: dict[str, list[str]] = {}
        for node in starts_of(region.steps[1]):
            found.setdefault(group_of(node), []).append(line_of(node))
        for alias, lines in found.items():
            place = rank_store(alias)
            assert place is not None
            orders.setdefault(place.ranks, set()).add(tuple(lines))
    return worst, orders


def _orders(*rows: tuple[int, ...], **how: Any) -> _Orders:
    """The orders of all backwards of all ranks, once their gradients were right."""
    found = run_ranks(_with_rows, _Sizes(rows, **how), world_size=len(rows), timeout_s=150)
    assert max(difference for difference, _ in found) < 1e-5
    groups = {ranks for _, orders in found for ranks in orders}
    return {ranks: set().union(*(orders.get(ranks, set()) for _, orders in found)) for ranks in groups}


@pytest.mark.core
def test_ranks_with_batches_of_other_sizes_follow_one_plan() -> None:
    few, many = (_orders((rows,), (rows,)) for rows in (4, 256))
    assert few != many
    assert _orders((4,), (256,)) == few  # that of the first rank
    assert _orders((256,), (4,)) == many


@pytest.mark.core
@long.parametrize("make", [_pairs, _lefts], always=[])
def test_the_splits_and_the_order_of_another_rank_are_followed_in_other_models(make: Callable[[], nn.Module]) -> None:
    alike = _orders((4,), (4,), make=make)
    assert alike != _orders((256,), (256,), make=make)
    assert alike == _orders((4, 4), (256, 4), make=make)


@pytest.mark.core
@long.parametrize("dynamic", [None, False], always=[])
def test_a_rank_that_compiles_alone_for_other_rows_follows_the_plan_that_all_have(dynamic: bool | None) -> None:  # noqa: FBT001
    assert _orders((4, 4, 4, 8), (4, 256, 4, 300), dynamic=dynamic) == _orders((4,), (4,))


_FOUR_RANKS = [((4, 4), (256, 4), (64, 256), (300, 4)), ((256, 4), (4, 4), (4, 256), (4, 8))]


@pytest.mark.core
@long.parametrize("rows", _FOUR_RANKS, always=[])
def test_replicas_with_batches_of_other_sizes_follow_one_plan(rows: tuple[tuple[int, ...], ...]) -> None:
    orders = _orders(*rows, mesh=(2, 2))
    assert orders.keys() == {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert all(len(each) == 1 for each in orders.values())


@pytest.mark.long
def test_compiles_that_are_stored_follow_one_plan_too() -> None:
    """The second time, both are loaded: that of the rank's own plan, and that of the plan to follow."""
    for _ in range(2):
        assert [len(each) for each in _orders((4, 4), (256, 4), lower="inductor").values()] == [1]


class _Reads(_Wide):
    """Rank 1 reads its blocks backwards, whose plan depends on rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in list(self.blocks)[:: -1 if dist.get_rank() == 1 else 1]:
            x = block(x)
        return x


@pytest.mark.long
@pytest.mark.parametrize(("make", "inputs"), [(_OtherWay, 32), (_Reads, 2048)])
@on_ranks(timeout_s=60)
def test_other_rows_do_not_hide_that_a_rank_reads_in_another_order(make: type[nn.Module], inputs: int) -> None:
    assert "must not depend on a rank's number or data" in _refusal(make(), (4, 256)[dist.get_rank()], inputs)


def _options_of_one_rank(name: str, values: tuple[Any, Any]) -> str:
    options = {"bucket_mb": 0, name: values[dist.get_rank()]}
    return _refusal(_pairs(), 4, 2048, what="compile with different options", **options)


_OTHER_OPTIONS: tuple[tuple[str, tuple[Any, Any]], ...] = (
    ("prefetch", ("auto", 1)),
    ("memory_budget_gb", (1.0, None)),
    ("bucket_mb", (0, 4.0)),
    ("embedding", ("gathered", "sharded")),
)


@pytest.mark.core
def test_other_options_of_one_rank_are_named_on_all_before_any_collective_runs() -> None:
    for name, values in _OTHER_OPTIONS:
        for message in run_ranks(_options_of_one_rank, name, values, timeout_s=60):
            assert f"options: {name}=" in message


@pytest.mark.long
@on_ranks(timeout_s=60)
def test_plans_that_promise_something_for_their_sizes_are_not_changed() -> None:
    message = _refusal(_Wide(), (4, 256)[dist.get_rank()], 2048, memory_budget_gb=0.2)
    assert "options={'prefetch': 1}" in message


@pytest.mark.core
@on_ranks(timeout_s=100)
def test_a_graph_that_layers_share_may_have_the_names_of_another_layer() -> None:
    """Rank 1 compiles its second layer again, for its rows; the other ranks share the first layer's graph."""
    experts = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2)]
    model = nn.ModuleDict({"experts": nn.ModuleList(experts)})
    for expert in experts:
        fully_shard(expert)
        expert.compile(backend="fsdp", dynamic=False, options={"lower": "eager"})
    rows = [3, 5] if dist.get_rank() == 1 else [4, 4]
    for _ in range(2):
        first, second = (expert(part) for expert, part in zip(experts, torch.ones(8, 32).split(rows), strict=True))
        loss_of(torch.cat([first, second])).backward()
    assert sum(p.grad is not None for p in model.parameters()) == 4


def _message_on_a_mesh() -> str:
    return _refusal(fully_shard(_OtherWay(), mesh=_mesh((2, 2))), 4, 32)


@pytest.mark.long
@pytest.mark.core
def test_replicas_of_ranks_that_differ_are_told_so_too() -> None:
    """Ranks 2 and 3 agree with each other, and would wait for their replicas."""
    messages = run_ranks(_message_on_a_mesh, world_size=4, timeout_s=200)
    assert "rank 0 and rank 1 compile different collectives" in messages[0]
    assert messages == messages[:1] * 4


def _refuses_on_one(mesh_shape: tuple[int, ...]) -> tuple[str, int]:
    """The last rank's budget is too small; after that, everyone tries again."""
    model = fully_shard(Slim(), mesh=_mesh(mesh_shape))
    is_last = dist.get_rank() == dist.get_world_size() - 1

    def step(budget_gb: float) -> None:
        torch._dynamo.reset()
        loss_of(compile_eagerly(model, memory_budget_gb=budget_gb)(torch.ones(4, 32))).backward()

    for _ in range(2):
        with pytest.raises(Exception, match="budget") as caught:
            step(1e-6 if is_last else 1.0)
    step(1.0)
    return str(caught.value), sum(p.grad is not None for p in model.parameters())


@pytest.mark.core
@long.parametrize("mesh_shape", [(2,), (2, 2)], always=[(2, 2)])
def test_who_would_wait_for_a_rank_that_refuses_hears_why_and_may_try_again(mesh_shape: tuple[int, ...]) -> None:
    *others, last = run_ranks(_refuses_on_one, mesh_shape, world_size=math.prod(mesh_shape), timeout_s=200)
    assert "refused to compile" not in last[0]
    for message, _ in others:
        assert f"rank {len(others)} refused to compile: " in message
        assert "memory_budget_gb" in message
    assert {made for _, made in (*others, last)} == {len(list(Slim().parameters()))}


@pytest.mark.long
@on_ranks(timeout_s=100)
def test_a_rank_that_is_refused_alone_goes_on_with_the_graphs_that_it_has() -> None:
    """Rank 1 is refused another graph of a model that it has one of; later, all ranks compile another model."""
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(Slim(), mesh=mesh)
    compiled = compile_eagerly(model)
    loss_of(compiled(torch.ones(4, 32))).backward()
    if dist.get_rank() == 1:
        with pytest.raises(Exception, match="budget"):
            compile_eagerly(model, memory_budget_gb=1e-6)(torch.ones(4, 32))
    loss_of(compiled(torch.ones(4, 32))).backward()
    other = fully_shard(nn.Linear(32, 7), mesh=mesh)
    assert len(compile_eagerly(other)(torch.ones(4, 32))) == 4


class _Steps(nn.Module):
    """A state that begins as a parameter: where its read comes in a graph depends on the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Parameter(torch.randn(1, 6))
        self.x, self.state = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, found = self.begin.expand(x.shape[0], 6), []
        for step in range(x.shape[1]):
            state = torch.tanh(self.x(x[:, step]) + self.state(state))
            found.append(state)
        return torch.stack(found, 1)


@pytest.mark.long
@pytest.mark.core
@on_ranks(timeout_s=60)
def test_a_rank_that_compiles_again_and_reads_in_another_order_follows_the_plan_that_all_have() -> None:
    """Rank 0 has no rows; rank 1 has three, and compiles again for three steps."""
    torch.manual_seed(0)
    model = _Steps()
    reference = copy.deepcopy(model)
    for part in (model.x, model.state, model):
        fully_shard(part)
    compiled = compile_eagerly(model, dynamic=True, bucket_mb=0)
    worst, orders = 0.0, []
    for steps in (4, 3):
        every = [torch.randn(rows, steps, 6) for rows in (0, 3)]
        (compiled(every[dist.get_rank()]).square().sum()).backward()
        (sum(reference(batch).square().sum() for batch in every) / 2).backward()
        worst = max(worst, gradient_difference(model, reference))
        (region,) = regions_of(units(model))
        orders.append([line_of(node) for node in starts_of(region.steps[0])])
    assert worst < 1e-5
    assert orders[0] == orders[1]


@pytest.mark.core
@on_ranks(timeout_s=60)
def test_a_rank_that_cannot_follow_ends_all_by_name() -> None:
    """Rank 0 has nothing to follow, and would go on to its first collective."""

    def refuse(self: FollowOrder, _step: object) -> None:
        raise CannotFollowError("no such order", where="here", instead="another one")

    with mock.patch.object(FollowOrder, "plan", refuse):
        message = _refusal(_Wide(), (4, 256)[dist.get_rank()], 2048, bucket_mb=0)
    assert "rank 0 and rank 1 compile different collectives" in message
    assert "options={'prefetch': 1}" in message


class _Chosen(nn.Module):
    """Rows of a table; from a quarter of its rows on, torch would rather look them up again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.silu(self.table[ids])


class _Scores(nn.Module):
    """A softmax of a part of a parameter, as long as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        return self.bias[:length, :length].softmax(-1) @ x


def _of_rows(count: int) -> torch.Tensor:
    return torch.randint(64, (count,))


def _of_length(length: int) -> torch.Tensor:
    return torch.randn(2, length, 8)


@pytest.mark.parametrize(("first", "batch"), [(_Chosen, _of_rows), (_Scores, _of_length)], ids=["rows", "length"])
@on_ranks(timeout_s=60)
def test_what_is_gathered_again_depends_on_no_size(first: Any, batch: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(first(), nn.Linear(8, 4))
    plain = copy.deepcopy(model)
    for part in model:
        fully_shard(part)
    compiled = compile_eagerly(fully_shard(model))
    for sizes in [(8, 8), (8, 48), (50, 9)]:
        every = [batch(size) for size in sizes]
        for one in (model, plain):
            one.zero_grad()
        compiled(every[dist.get_rank()]).square().sum().backward()
        torch.stack([plain(each).square().sum() for each in every]).mean().backward()
        assert gradient_difference(model, plain) < 1e-4
