"""`torch.autocast`: half the bytes are gathered, and every bit is that of gathering first and casting then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.tensor import DTensor

from fsdp_compile import explain, fully_shard
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.ir.graph import Phase, Role, StepGraph, require
from fsdp_compile.lower import region
from fsdp_compile.partition import partition
from tests import long
from tests.fake_world import fake_world
from tests.models.round_sizes import Stack, on_meta
from tests.partition.test_partition import each_graph
from tests.ranks import run_ranks
from tests.two_sides import compile_eagerly, mesh_of

WIDTH = 20


class Block(nn.Module):
    """Odd rows, a norm in float32, a weight that is read through a view, and one that has two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH, bias=False)
        self.mixed = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)
        self.twice = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            h = self.norm(x.float())
        x = x + self.down(F.gelu(self.up(h))) + h @ self.mixed.T
        return x + torch.tanh(h @ self.twice) + self.twice.square().mean()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 40, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


NARROW = {"up.weight", "up.bias", "down.weight", "mixed"}
"""Parameters of a block that are read in bfloat16 alone."""


def _read_dtypes(dtype: torch.dtype, **sharding: Any) -> dict[Phase, dict[str, set[torch.dtype]]]:
    """In which dtypes the graphs of each phase read the parameters, by name without the unit's."""
    seen: dict[Phase, dict[str, set[torch.dtype]]] = {}

    def see(step: StepGraph) -> None:
        for node in step.nodes(Role.FULL):
            record = require(node)
            name = record.parameters[0].removeprefix(f"{record.unit}.")
            seen.setdefault(step.phase, {}).setdefault(name, set()).add(node.meta["val"].dtype)

    with each_graph(see):
        compiled = _sharded(Model(), **sharding)
        with torch.autocast("cpu", dtype):
            loss = compiled(torch.arange(12).view(3, 4)).float().logsumexp(-1).mean()
        loss.backward()
    return seen


def _sharded(model: nn.Module, **sharding: Any) -> Callable[..., torch.Tensor]:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **sharding)
    fully_shard(model, **sharding)
    return compile_eagerly(model)


@long.parametrize("dtype", [torch.bfloat16, torch.float16], always=[torch.bfloat16])
def test_what_is_only_read_in_16_bits_is_gathered_in_them(dtype: torch.dtype) -> None:
    with fake_world(3):
        forward, backward = _read_dtypes(dtype, reshard_after_forward=True).values()
    assert {name for name, dtypes in forward.items() if dtypes == {dtype}} == NARROW | {"head.weight"}
    assert {name for name, dtypes in backward.items() if dtypes == {dtype}} == NARROW - {"up.bias"} | {"head.weight"}
    assert forward["norm.weight"] == forward["embedding.weight"] == {torch.float32}
    # Its cast is not a second all-gather: each parameter is gathered once.
    assert forward["twice"] == backward["twice"] == {torch.float32}


def _gather_as_stored(graph: fx.Graph) -> None:
    """In the place of the cast before the all-gather: nothing."""


def _trained(dtype: torch.dtype, mesh: tuple[int, ...] | None, sharding: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Model()
    if mesh is not None:
        sharding = {**sharding, "mesh": mesh_of(mesh)}
    compiled = _sharded(model, **sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    seen = []
    for step in range(3):
        tokens = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", dtype):
            loss = compiled(tokens).float().logsumexp(-1).mean()
        loss.backward()
        seen.append(loss.detach())
        for parameter in model.parameters():
            assert isinstance(parameter.grad, DTensor)
            seen.append(parameter.grad.full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), torch.autocast("cpu", dtype):
        seen.append(compiled(tokens))
    return seen


STRATEGIES: dict[str, tuple[tuple[int, ...] | None, dict[str, Any]]] = {
    "resharded": (None, {}),
    "unsharded until backward": (None, {"reshard_after_forward": False}),
    "planned": (None, {"reshard_after_forward": "auto"}),
    "a part of each kept": (None, {"reshard_after_forward": 2}),
    "replicas": ((2, 2), {}),
}


def _differ(name: str, dtype: torch.dtype) -> list[int]:
    """Which of the losses, gradients and outputs are not the bits of gathering what is stored."""
    mesh, sharding = STRATEGIES[name]
    narrow = _trained(dtype, mesh, sharding)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        for module in (region, partition):
            patch.setattr(module, "cast_before_gather", _gather_as_stored)
        wide = _trained(dtype, mesh, sharding)
    return [place for place, pair in enumerate(zip(narrow, wide, strict=True)) if not torch.equal(*pair)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in STRATEGIES), ("resharded", torch.float16)]
)
def test_training_gives_the_bits_of_gathering_what_is_stored(name: str, dtype: torch.dtype) -> None:
    ranks = 2 if name in ("resharded", "planned") else 4
    assert run_ranks(_differ, name, dtype, world_size=ranks) == [[]] * ranks


def test_a_report_counts_the_bytes_that_are_sent() -> None:
    model, x = on_meta(Stack)
    options: dict[str, Any] = {"lower": "eager"}
    wide = explain(model, x, world_size=4, options=options)
    with torch.autocast("cpu", torch.bfloat16):
        narrow, elsewhere = (explain(model, x, world_size=size, options=options) for size in (4, 8))
    assert {unit.sent for unit in wide.units} == {("float32",)}
    assert {unit.sent for unit in narrow.units} == {("float32", "bfloat16")}  # norms are read in float32
    sent = narrow.volume.sent_bytes
    assert sent[Kind.GATHER] < 0.51 * wide.volume.sent_bytes[Kind.GATHER]
    assert sent[Kind.REDUCE] == wide.volume.sent_bytes[Kind.REDUCE]
    # One and one gather of a half, one reduction.
    assert narrow.volume.full_sharding_bytes < 0.67 * wide.volume.full_sharding_bytes
    assert narrow.at(world_size=8).volume == elsewhere.volume
