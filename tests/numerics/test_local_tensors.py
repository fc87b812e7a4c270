"""Graphs of 8 to 16 ranks, each with data of its own, run in one process: sums over ranks are those of one process.

Torch's `LocalTensor` is one tensor per rank: what a graph does, it does for each of them, and its collectives exchange
what the ranks have. So every rank takes part here, where a fake group returns what this rank has brought.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn

from fsdp_compile import fully_shard, units
from fsdp_compile.ir.graph import Role, require, role_of
from fsdp_compile.lower import eager
from fsdp_compile.lower.compiled_step import Compiled
from tests import long
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Stack
from tests.two_sides import mesh_of

local = pytest.importorskip("torch.distributed._local_tensor", reason="torch 2.13 and later have it")
ROWS = 3
"""Of each rank."""


class _WithLoss(nn.Module):
    """Rows that do not divide over the ranks, or are fewer than they."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(x).square().mean()


@dataclasses.dataclass(frozen=True)
class _Ranks:
    """A mesh: sharded over its last dimension."""

    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return torch.Size(self.shape).numel()

    def sharded(self, model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=mesh_of(self.shape))

    def flats(self, model: nn.Module) -> list[dict[tuple[str, ...], torch.Tensor]]:
        """What each rank has of a plain model, flat parameter by flat parameter."""
        found = []
        for rank in range(self.count):
            with fake_world(self.count, rank=rank):
                sharded = self.sharded(_copy(model))
                groups = [group for unit in units(sharded) for group in unit.groups]
                found.append({tuple(param.name for param in group.params): group.flat.detach() for group in groups})
        return found


def _copy(model: nn.Module) -> nn.Module:
    copied = _WithLoss()
    copied.load_state_dict(model.state_dict())
    return copied


def _graphs(model: nn.Module, ranks: _Ranks) -> list[fx.GraphModule]:
    """Forward and backward, as they run on every rank; call it inside of the world."""
    found: list[fx.GraphModule] = []
    real = eager.boxed

    def boxed(interpreter: fx.Interpreter) -> Compiled:
        assert isinstance(interpreter.module, fx.GraphModule)
        found.append(interpreter.module)
        return real(interpreter)

    torch._dynamo.reset()
    with mock.patch.object(eager, "boxed", boxed):
        compiled = torch.compile(ranks.sharded(_copy(model)), backend="fsdp", options={"lower": "eager"})
        compiled(torch.randn(ROWS, WIDTH)).backward()
    return found


def _each(tensors: Sequence[torch.Tensor]) -> Any:
    return local.LocalTensor(dict(enumerate(tensors)))


def _run(gm: fx.GraphModule, inputs: Sequence[Any], ranks: _Ranks) -> Any:
    with torch.no_grad(), local.LocalTensorMode(ranks.count):
        return fx.Interpreter(gm).run(*inputs)


@long.parametrize("shape", [(8,), (16,), (2, 4), (4, 4), (8, 2)], always=[(2, 4)], ids=str)
def test_sums_over_many_ranks_are_those_of_one_process(shape: tuple[int, ...]) -> None:
    ranks = _Ranks(shape)
    torch.manual_seed(0)
    model = _WithLoss()
    data = torch.randn(ranks.count, ROWS, WIDTH)
    of_ranks = ranks.flats(model)
    with fake_world(ranks.count):
        forward, backward = _graphs(model, ranks)
        places = list(forward.graph.find_nodes(op="placeholder"))
        keys = [tuple(require(node).parameters) if role_of(node) is Role.FLAT else None for node in places]
        inputs = [_each([f[key] for f in of_ranks] if key else list(data)) for key in keys]
        loss, *saved = _run(forward, inputs, ranks)
        wanted = [node.name for node in backward.graph.find_nodes(op="placeholder")]
        ones = _each([torch.ones(())] * ranks.count)
        gradients = _run(backward, [*saved, ones][-len(wanted) :], ranks)

    losses = [model(x) for x in data]
    torch.stack(losses).mean().backward()
    for rank, expected in enumerate(losses):
        torch.testing.assert_close(loss._local_tensors[rank], expected)
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    for rank, expected_flats in enumerate(ranks.flats(model)):
        assert {key for key in keys if key} == expected_flats.keys()
        for key, gradient in zip(keys, gradients, strict=True):
            if key is not None:
                torch.testing.assert_close(gradient._local_tensors[rank], expected_flats[key])
