"""The first rank says what a compile is at, to those who ask."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

from fsdp_compile.progress import LOGGER
from fsdp_compile.training.metrics import open_display
from tests.fsdp2.decoder import progress_lines
from tests.models.kinds import Slim
from tests.ranks import on_ranks
from tests.two_sides import compile_eagerly, loss_of


@on_ranks()
def test_the_first_rank_says_each_stage_and_which_graph_of_how_many() -> None:
    with progress_lines() as lines:
        compiled = torch.compile(Slim(), backend="fsdp", options={"lower": "eager"})
        loss_of(compiled(torch.ones(4, 32))).backward()
        with torch.no_grad():
            compiled(torch.ones(4, 32))
    stages = [
        "Slim is compiled as a whole: it has fewer than 12 like units",
        "region 0: tracing forward and backward",
        "region 0: passes over the forward graph (1 of 2)",
        "region 0: passes over the forward graph (1 of 2) took",
        "region 0: passes over the backward graph (2 of 2)",
        "region 0: passes over the backward graph (2 of 2) took",
        "region 0: lowering the forward graph (1 of 2)",
        "region 0: lowering the forward graph (1 of 2) took",
        "region 0: lowering the backward graph (2 of 2)",
        "region 0: lowering the backward graph (2 of 2) took",
        "region 1: tracing forward",
        "region 1: passes over the forward graph (1 of 1)",
        "region 1: passes over the forward graph (1 of 1) took",
        "region 1: lowering the forward graph (1 of 1)",
        "region 1: lowering the forward graph (1 of 1) took",
    ]
    assert [line.partition(" took")[0] + " took" * (" took" in line) for line in lines] == (
        [] if dist.get_rank() else stages
    )
    with progress_lines(logging.WARNING) as lines:  # to those who do not ask it says nothing
        compile_eagerly(Slim())(torch.ones(4, 32))
    assert lines == []


def test_a_run_in_a_terminal_shows_it_beside_its_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes anything for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    level = LOGGER.level
    with open_display(3):
        LOGGER.info("region 0: tracing")
    assert "region 0: tracing" in capsys.readouterr().out
    assert LOGGER.level == level


def test_a_run_in_a_pipe_says_nothing_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with open_display(3):
        LOGGER.info("region 0: tracing")
    assert capsys.readouterr().out == ""
