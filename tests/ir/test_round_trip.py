"""Text of every graph that the pipeline makes is read back to an equal graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compile.ir.text.parser import parse_graph
from fsdp_compile.ir.text.printer import format_graph
from tests import long
from tests.ir.capture import Snapshot, capture, records_of
from tests.models import texts

MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mlp": (texts.mlp, torch.ones(3, 5)),
    "normed": (texts.normed, torch.ones(3, 8)),
    "tied": (texts.tied, torch.tensor([[1, 2, 3], [4, 5, 6]])),
    "mixed": (texts.mixed, torch.ones(6, 16)),
}


def check(snapshots: list[Snapshot]) -> None:
    assert {s.phase.value for s in snapshots} == {"forward", "backward"}
    for snapshot in snapshots:
        parsed = parse_graph(snapshot.text)
        assert format_graph(parsed) == snapshot.text, snapshot.after
        assert records_of(parsed) == snapshot.records, snapshot.after
        parsed.graph.lint()


@pytest.mark.core
@long.parametrize("world_size", [1, 2, 8], always=[8])
@pytest.mark.parametrize("name", MODELS)
def test_every_graph_is_read_back(name: str, world_size: int) -> None:
    make_model, x = MODELS[name]
    check(capture(make_model, [x], world_size=world_size))


@pytest.mark.core
@long.parametrize("name", MODELS, always=["mlp", "tied"])
def test_sizes_may_be_symbols(name: str) -> None:
    make_model, x = MODELS[name]
    snapshots = capture(make_model, [x], world_size=2, dynamic=True)
    assert all("\nsymbol s" in s.text for s in snapshots)
    check(snapshots)


def test_replicas_are_read_back() -> None:
    check(capture(texts.replicated_mlp, [torch.ones(3, 5)], world_size=4))


@long.parametrize("name", MODELS, always=["tied", "mixed"])
def test_ranks_have_the_same_text(name: str) -> None:
    make_model, x = MODELS[name]
    first, last = (capture(make_model, [x], world_size=8, rank=rank) for rank in (0, 7))
    assert [s.text for s in first] == [s.text for s in last]
