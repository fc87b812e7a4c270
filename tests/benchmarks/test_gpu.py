"""Runs on a GPU, in namespaces and for a long time: what is planned, what is missing, what is left over."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import models, soak
from benchmarks.contenders import Setup, chosen
from benchmarks.gpu import peaks, run_all
from benchmarks.gpu.run_all import CONTENDERS, Part, main, parts
from benchmarks.network import namespaces
from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.wire import Link
from benchmarks.steps import prepare

CPU = ["--device", "cpu"]


def _arguments(*more: str) -> argparse.Namespace:
    return run_all._parser().parse_args([*CPU, *more])


def test_all_parts_fit_ten_minutes_the_most_telling_first() -> None:
    arguments = _arguments()
    made = parts(arguments)
    assert sum(part.limit_s for part in made) <= arguments.limit_s <= 600
    assert [part.name.partition(",")[0] for part in made[:3]] == ["parity", "step time", "peak memory"]
    assert len({part.name for part in made}) == len(made)


def test_every_contender_is_there() -> None:
    wanted = {"unsharded", "fsdp2", "fsdp2_compiled_blocks", "inductor_bucketing", "inductor_overlap", "fsdp_compile"}
    assert set(CONTENDERS) == wanted | {"fsdp_compile_cuda_graphs"}


def _broken(part: str) -> str:
    """What the process of a part does, in Python."""
    return {
        "hangs": "import time; time.sleep(60)",
        "dies": "import sys; sys.exit('a device-side assert')",
        "NaN": "import json, sys; open(sys.argv[-1], 'w').write(json.dumps({'losses': [float('nan')]}))",
    }[part]


def test_a_part_that_fails_ends_no_other(tmp_path: Path) -> None:
    real = subprocess.run

    def run(command: list[str], **options: object) -> object:
        if "--only" not in command:
            return real(command, **options)  # type: ignore[call-overload]
        name = command[command.index("--only") + 1]
        return real([sys.executable, "-c", _broken(name), command[-1]], **options)  # type: ignore[call-overload]

    made = [Part(name, dict, 2.0) for name in ("hangs", "dies", "NaN")]
    out = tmp_path / "all.json"
    with mock.patch.object(run_all, "parts", return_value=made), mock.patch.object(subprocess, "run", run):
        assert main([*CPU, "--smoke", "--out", str(out)]) == 0
    hung, died, odd = json.loads(out.read_text())["results"]
    assert hung["error"] == "not done within 2 s"
    assert died["error"] == "ended with status 1: a device-side assert"
    assert odd["losses"] == ["nan"]


def test_contenders_that_there_is_no_time_for_are_named() -> None:
    with emulated_world(8, Network(Link(bytes_per_s=1e15))):
        task = models.llama(models.SMOKE)
        ready, failed = prepare(chosen(CONTENDERS), task, Setup(task.block), limit_s=-1.0)
    assert not ready
    assert all("no time was left" in str(samples.error) for samples in failed.values())


@pytest.mark.long
def test_budgets_and_predictions_are_of_the_graphs_that_ran() -> None:
    task = models.llama(models.SMOKE)
    setup = Setup(task.block, param_dtype=torch.bfloat16, options={"lower": "eager"})
    rows = peaks.run(task, setup, (8, 64))["rows"]
    assert [row["ranks"] for row in rows] == [8, 8, 64]
    assert all(row["peak_bytes"] > 0 and row["predicted_bytes"] > 0 for row in rows)
    # The smallest budget is what its graphs need: some bytes of scalars aside, neither more nor less.
    assert rows[1]["predicted_bytes"] == pytest.approx(rows[1]["budget_gb"] * 1e9, rel=1e-3)
    assert rows[1]["predicted_bytes"] < rows[0]["predicted_bytes"]


@pytest.mark.parametrize(
    ("missing", "user", "says"), [("tc", 0, "tc not found: install iproute2"), ("", 1000, "need root")]
)
def test_what_namespaces_need_is_named(missing: str, user: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == missing else f"/sbin/{tool}")
    monkeypatch.setattr("os.geteuid", lambda: user)
    with pytest.raises(namespaces.UnavailableError, match=says):
        namespaces.check_available()


@pytest.mark.optional
def test_the_link_has_its_rate_and_goes_away() -> None:
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(namespaces.slow_network(1.0))
        except namespaces.UnavailableError as error:
            pytest.skip(str(error))
        shown = _output("ip", "netns", "exec", hosts[0].namespace, "tc", "qdisc", "show", "dev", hosts[0].interface)
        assert "rate 1Gbit" in shown
        assert hosts[0].namespace in _output("ip", "netns", "list")
    assert hosts[0].namespace not in _output("ip", "netns", "list")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _rounds(**last: float) -> list[dict[str, float]]:
    flat = dict.fromkeys(soak.COUNTS, 5) | {"memory_mb": 400.0}
    return [*([flat] * 7), flat | last]


def test_what_grows_is_named() -> None:
    assert soak.grown(_rounds()) == []
    assert soak.grown(_rounds(threads=6)) == ["threads went from 5 to 6"]
    assert soak.grown(_rounds(graph_modules=11, meshes=4)) == ["graph_modules went from 5 to 11"]
    filling = [{**row, "threads": number} for number, row in enumerate(_rounds())]
    assert soak.grown(filling) == ["threads went from 2 to 7"], "the first rounds do not count"


def test_memory_may_grow_by_a_share() -> None:
    for mb_per_round, problems in ((0.5, 0), (5.0, 1)):
        rounds = [{**row, "memory_mb": 400 + number * mb_per_round} for number, row in enumerate(_rounds())]
        assert len(soak.grown(rounds)) == problems


@pytest.mark.long
def test_nothing_is_left_of_models_and_worlds(tmp_path: Path) -> None:
    assert soak.main(["--smoke", "--out", str(tmp_path / "soak.json")]) == 0
    assert len(json.loads((tmp_path / "soak.json").read_text())["results"]) == 4
