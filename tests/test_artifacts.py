"""`options={"artifacts": folder}` and the structured trace."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_compile import artifacts
from fsdp_compile.ir.text.parser import parse_graph
from fsdp_compile.ir.text.printer import format_graph
from fsdp_compile.options import FSDPOptions
from fsdp_compile.pipeline import passes
from tests.fake_world import fake_world
from tests.models.kinds import Stack
from tests.numerics.one_process.measure import batches
from tests.ranks import on_ranks
from tests.two_sides import loss_of


def _train_once(folder: str) -> None:
    compiled = torch.compile(Stack(1), backend="fsdp", options={"lower": "eager", "artifacts": folder})
    (batch,) = batches(1, 4)
    loss_of(compiled(batch)).backward()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts") / "out"
    with fake_world(2):
        _train_once(str(folder))
    return folder


def test_every_pass_of_every_graph_is_written_once(written: Path) -> None:
    assert sorted(f.name for f in written.iterdir()) == ["graph00-forward", "graph01-backward"]
    names = [p.name for p in passes(FSDPOptions())]
    for graph in written.iterdir():
        expected = {"0-captured.txt"}
        for position, name in enumerate(names, 1):
            expected |= {f"{position}-{name}{kind}.txt" for kind in ("", ".plan", ".diff")}
        assert {f.name for f in graph.iterdir()} == expected


def test_written_graphs_read_back(written: Path) -> None:
    for file in written.glob("*/6-schedule-reshard.txt"):
        text = file.read_text()
        assert "all_gather" in text
        assert format_graph(parse_graph(text)).rstrip("\n") == text.rstrip("\n")
    assert "fsdp_compile.unshard" in (written / "graph00-forward" / "0-captured.txt").read_text()
    assert "\n+%all_gather" in (written / "graph00-forward" / "1-insert-collectives.diff.txt").read_text()


@pytest.mark.long
@on_ranks()
def test_all_ranks_write_the_same_text(tmp_path: Path) -> None:
    mine, other = (tmp_path / str(rank) for rank in (dist.get_rank(), 1 - dist.get_rank()))
    first_of_all = SimpleNamespace(is_initialized=dist.is_initialized, get_rank=lambda: 0)
    with mock.patch.object(artifacts, "dist", first_of_all):
        _train_once(str(mine))
    dist.barrier()
    files = {f.relative_to(mine): f.read_text() for f in mine.rglob("*.txt")}
    assert files
    assert files == {f.relative_to(other): f.read_text() for f in other.rglob("*.txt")}
    dist.barrier()


SCRIPT = """
import os, torch
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
model = torch.nn.Linear(4, 4)
torch.compile(model, backend="fsdp", options={"lower": "eager"})(torch.ones(2, 4)).sum().backward()
"""


def test_a_folder_with_gaps_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "graph03-forward").mkdir()
    (tmp_path / "graph-notes").mkdir()
    with fake_world(2):
        _train_once(str(tmp_path))
    new = {"graph04-forward", "graph05-backward"}
    assert {path.name for path in tmp_path.iterdir()} == {"graph03-forward", "graph-notes"} | new


@pytest.mark.long
def test_structured_trace_has_the_graphs(tmp_path: Path) -> None:
    import os

    environment = {**os.environ, "TORCH_TRACE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=environment, timeout=120)
    trace = "".join(f.read_text() for f in tmp_path.iterdir())
    assert "fsdp_forward_1-insert-collectives.txt" in trace
    assert re.search(r"fsdp_backward_\d+-schedule-reshard\.plan\.txt", trace)
