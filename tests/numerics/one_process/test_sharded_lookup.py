"""Embeddings that stay sharded: the numbers of gathered ones, in every way in which gradients are made."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp_compile
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.errors import BudgetTooSmallError, ConfigError
from fsdp_compile.explain.plan import Plan
from tests import long
from tests.ranks import on_ranks
from tests.two_sides import MIXED, compile_eagerly, local, made, mesh_of

WIDTH = 16


class Words(nn.Module):
    def __init__(self, rows: int = 37, *, twice: bool = False, **settings: Any) -> None:
        super().__init__()
        self.twice = twice
        self.table = nn.Embedding(rows, WIDTH, **settings)
        self.layer: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, rows)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        if self.twice:
            x = x + self.table(ids.flip(0))
        return self.head(torch.relu(self.layer(x)))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how it is sharded, and how a step is made."""

    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # of `Words`
    # Names of modules that are a unit, before the rest; `None` leaves that to the automatic split.
    units: tuple[str, ...] | None = None
    # Of `fully_shard`; without them and `units` it is left to the backend.
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    passes: int = 1  # backward passes per step; all but the last hold their gradients
    in_backward: bool = False  # whether the optimizer steps there
    frozen: bool = False  # whether the table is
    dtype: torch.dtype = torch.int64  # of the ids
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the compile

    def made(self) -> Words:
        model: Words = made(lambda: Words(**self.settings))
        model.table.requires_grad_(not self.frozen)
        arguments = {name: value() if name == "mesh" else value for name, value in self.arguments.items()}
        for name in self.units or ():
            fsdp_compile.fully_shard(model.get_submodule(name), **arguments)
        if self.units is not None or arguments or self.in_backward:
            fsdp_compile.fully_shard(model, **arguments)
        return model


KEPT = {"reshard_after_forward": False}
INDUCTOR = {"lower": "inductor"}
# FSDP2's usual layout: table and head are the root's, and the head's gradient is reduced long before the rows.
BY_HAND = ("layer",)
CASES = {
    "plain": Case(),
    "compiled": Case(options=INDUCTOR),
    "padding": Case({"padding_idx": -2}),
    "by-frequency": Case({"scale_grad_by_freq": True}),
    "fewer-rows-than-ranks": Case({"rows": 1}),
    "narrow-ids": Case(dtype=torch.int32),
    "bf16": Case(arguments={"mp_policy": MIXED}),
    "fp16-reduced": Case(arguments={"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}),
    "kept": Case(arguments=KEPT),
    "one-unit": Case(units=("head",)),
    "in-backward": Case(in_backward=True),
    "frozen": Case(frozen=True),
    "markers": Case(options={"stop_after": "capture"}),
    "fsdp2-layout": Case(units=("head",), options={"reduce_layout": "fsdp2"}),
    "by-hand": Case(units=BY_HAND, options={"prefetch": 1}),
    "by-hand-fsdp1": Case(units=BY_HAND, options={"prefetch": "BACKWARD_POST"}),
    "by-hand-compiled": Case(units=BY_HAND, options={**INDUCTOR, "prefetch": 2}),
    "by-hand-in-backward": Case(units=BY_HAND, in_backward=True, options={"prefetch": 1}),
    "accumulated": Case(arguments=KEPT, passes=2),
}


def _trained(case: Case, embedding: str) -> list[torch.Tensor]:
    """Losses, gradients and parameters of three steps; ranks have batches of different sizes."""
    torch.compiler.reset()
    model: Any = case.made()
    compiled = compile_eagerly(model, dynamic=False, embedding=embedding, **case.options)
    optimizer: torch.optim.Optimizer
    if case.in_backward:
        optimizer = fsdp_compile.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found: list[torch.Tensor] = []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        for number in range(case.passes):
            ids = torch.randint(0, model.table.num_embeddings, (3 + dist.get_rank(), 4), dtype=case.dtype)
            held = number < case.passes - 1
            with fsdp_compile.no_sync(model) if held else contextlib.nullcontext():
                loss = compiled(ids).float().square().mean()
                loss.backward()
            found.append(loss.detach())
        found += [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        found += [local(p.detach()).clone() for p in model.parameters()]
    return found


@pytest.mark.core
@long.parametrize("name", CASES, always=["padding", "by-hand"])
@on_ranks()
def test_two_ranks_train_to_the_bits_of_gathered_tables(name: str) -> None:
    case = CASES[name]
    pairs = zip(_trained(case, "gathered"), _trained(case, "sharded"), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.long
@on_ranks()
def test_budgets_change_no_bit_where_the_root_has_the_table() -> None:
    too_small = Case(units=BY_HAND, options={"memory_budget_gb": 1e-9})
    with pytest.raises(Exception, match="do not hold") as caught:
        _trained(too_small, "sharded")
    error: BaseException | None = caught.value
    while not isinstance(error, BudgetTooSmallError):
        assert error is not None
        error = error.__cause__ or error.__context__
    wanted = _trained(Case(units=BY_HAND), "gathered")
    budgets = [error.least_bytes * times / 1e9 for times in (1.001, 1.3)]
    cases = [Case(units=BY_HAND, options={"memory_budget_gb": budget}) for budget in budgets]
    assert [all(map(torch.equal, wanted, _trained(case, "sharded"))) for case in cases] == [True, True]


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "ranks"),
    [(Case({"twice": True}), 2), (Case(), 3), (Case(arguments={"mesh": functools.partial(mesh_of, (2, 2))}), 4)],
    ids=["two-lookups", "three-ranks", "replicas"],
)
@on_ranks(world_size=lambda ranks, **_: ranks)
def test_where_sums_are_made_in_another_order_numbers_agree_to_rounding(case: Case, ranks: int) -> None:
    pairs = zip(_trained(case, "gathered"), _trained(case, "sharded"), strict=True)
    assert max(float((one - other).abs().max()) for one, other in pairs if one.numel()) < 1e-5


@pytest.mark.long
@on_ranks()
def test_a_forward_without_gradients_looks_up_as_well() -> None:
    model = made(Words).eval()
    ids = torch.arange(12).view(3, 4)
    wanted = model(ids)
    compiled = compile_eagerly(model, embedding="sharded")
    with torch.no_grad():
        assert torch.equal(compiled(ids), wanted)


@on_ranks()
def test_bad_ids_of_one_rank_stop_every_rank() -> None:
    is_bad = dist.get_rank() == 1
    says = (
        "^ids from 0 to 37 are looked up in an embedding of 37 rows"
        if is_bad
        else "^rank 1 looks up ids that are out of range in an embedding of 37 rows"
    )
    with pytest.raises(IndexError, match=says):
        compile_eagerly(Words(), embedding="sharded")(torch.tensor([0, 37 if is_bad else 36]))


def _plan(model: nn.Module, **options: Any) -> Plan:
    ids = torch.zeros(3, 4, dtype=torch.int64)
    return fsdp_compile.explain(model, ids, world_size=4, options=options)


def test_a_plan_shows_what_travels_in_place_of_the_table() -> None:
    gathered, sharded = (_plan(Words(), embedding=embedding) for embedding in ("gathered", "sharded"))
    tables = [c for g in sharded.graphs for c in g.collectives if "table.weight" in c.parameters]
    assert [c.kind for c in tables] == [Kind.EXCHANGE, Kind.EXCHANGE]
    rows_bytes, ids_bytes = 12 * WIDTH * 4, 12 * 8
    assert [c.size_bytes for c in tables] == [rows_bytes + ids_bytes] * 2
    # A gather and a reduction of 37 rows: 10 of each of 4 ranks, 640 bytes, padded to 768.
    spared = 2 * 4 * 768 - 2 * (rows_bytes + ids_bytes)
    assert sum(gathered.volume.sent_bytes.values()) - sum(sharded.volume.sent_bytes.values()) == spared * 3 / 4
    assert not [one for one in sharded.skipped if "table.weight" in str(one) and "not gathered in forward" in str(one)]
    assert "exchange" in str(sharded)


class Block(nn.Sequential):
    """A unit of `Deep`."""


class Deep(Words):
    """A stack whose reductions are hidden, and waited for before the rows of the table are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32000, 2048), nn.Linear(2048, 32000, bias=False)
        self.layer = nn.Sequential(*(Block(nn.Linear(2048, 8192), nn.Linear(8192, 2048)) for _ in range(6)))


@long.parametrize("options", [{}, {"memory_budget_gb": 16.0}, {"prefetch": 1}], always=[{"prefetch": 1}], ids=str)
def test_blocks_by_hand_below_a_root_with_the_table_are_planned(options: dict[str, Any]) -> None:
    with torch.device("meta"):
        model, ids = Deep(), torch.zeros(4, 2048, dtype=torch.int64)
    blocks = ModuleWrapPolicy({Block})
    chosen: Any = {"embedding": "sharded", "auto_wrap_policy": blocks, **options}
    plan = fsdp_compile.explain(model, ids, world_size=8, hardware=hardware("h100-sxm", "ib-400"), options=chosen)
    assert [c.kind for g in plan.graphs for c in g.collectives if "table.weight" in c.parameters] == [Kind.EXCHANGE] * 2


def test_a_plan_of_another_world_has_the_exchange() -> None:
    plan = _plan(Words(), embedding="sharded")
    sent = [one.volume.sent_bytes[Kind.EXCHANGE] for one in (plan, plan.at(world_size=8))]
    assert sent[1] / (7 / 8) == pytest.approx(sent[0] / (3 / 4))


class Tied(Words):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.table.weight


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Tied, "its weight is read in other ways too"),
        (lambda: Words(sparse=True), "sharded gradients are dense"),
    ],
    ids=["tied", "sparse"],
)
def test_a_table_that_cannot_stay_sharded_is_refused_by_name(model: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        _plan(model(), embedding="sharded")
    assert "table" in str(caught.value)
    assert "'embedding': 'sharded'" in str(caught.value)


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match='"gathered" or "sharded"'):
        fsdp_compile.FSDPOptions(embedding="row-wise")  # type: ignore[arg-type]
