"""Each benchmark's command runs with tiny sizes and writes JSON that says with what it was measured."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure
from benchmarks.__main__ import BENCHMARKS
from benchmarks.command import finish
from benchmarks.models import SMOKE, llama, parameter_bytes
from benchmarks.network import namespaces

_ALL = pytest.mark.skipif(
    "FSDP_COMPILE_BENCHMARKS" not in os.environ, reason="compiles for minutes; set FSDP_COMPILE_BENCHMARKS=1 to run it"
)
_OURS_AND_FSDP2 = ["--contenders", "fsdp2", "fsdp_compile"]
_EAGER = ["--fsdp-options", '{"lower": "eager"}', *_OURS_AND_FSDP2]


def _run(name: str, folder: Path, *arguments: str) -> dict[str, Any]:
    out = folder / "result.json"
    status = importlib.import_module(f"benchmarks.{name}").main(["--smoke", "--out", str(out), *arguments])
    assert status == 0
    document = json.loads(out.read_text())
    assert (document["benchmark"], document["smoke"]) == (name, True)
    assert {"commit", "packages", "processor", "cores"} <= document["environment"].keys()
    return document


def _by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["contender"]: row for row in rows}


@pytest.mark.long
def test_bytes_that_are_sent_are_counted_and_padded(tmp_path: Path) -> None:
    # Apart: what tiny units share is packed, and larger ones than these share nothing.
    document = _run("sent_bytes", tmp_path, "--fsdp-options", '{"lower": "eager", "bucket_mb": 0}', *_OURS_AND_FSDP2)
    size_bytes = parameter_bytes(llama(SMOKE).make())
    rows = _by_name(document["results"])
    for row in rows.values():
        assert "error" not in row
        padded = 1 + (row["padding"] or 0.0)
        # Each gradient is reduced once; values that no gradient needs are not gathered a second time.
        assert row["sent_bytes"]["reduce_scatter"] == pytest.approx(size_bytes * 7 / 8 * padded)
        assert row["total_sent_bytes"] <= 3 * size_bytes * 7 / 8 * (padded + 1e-9)
        assert 0 < row["least_bytes"] <= row["total_sent_bytes"]
    assert rows["fsdp2"]["padding"] is rows["fsdp2"]["copied_bytes"] is None  # it has no parameter groups of ours
    assert rows["fsdp_compile"]["copied_bytes"]["into gathers"] == 0


@pytest.mark.long
def test_chunks_of_a_loss_gather_the_head_once(tmp_path: Path) -> None:
    contenders = ["--contenders", "fsdp2", "fsdp2_head_apart", "fsdp_compile"]
    options = '{"lower": "eager", "bucket_mb": 0, "prefetch": 1}'
    rows = _by_name(_run("chunked_loss", tmp_path, "--chunks", "4", "--fsdp-options", options, *contenders)["results"])
    head_bytes = SMOKE.vocabulary * SMOKE.width * 4 * 7 / 8
    assert not any("error" in row for row in rows.values())
    # FSDP2 has the head gathered for the whole step in the root unit, else 4 times in forward and 4 in backward.
    root, apart, ours = (rows[name] for name in contenders[1:])
    assert apart["gathered_bytes"] == pytest.approx(root["gathered_bytes"] + 7 * head_bytes, rel=0.01)
    # Ours once more, in backward; tiny parameters are padded besides.
    assert ours["gathered_bytes"] < root["gathered_bytes"] + 2 * head_bytes


@pytest.mark.long
def test_both_links_of_tensor_parallelism_are_counted(tmp_path: Path) -> None:
    rows = _by_name(_run("two_links", tmp_path, "--lower", "eager")["results"])
    assert list(rows) == ["unsharded", "fsdp2", "fsdp2_compiled_blocks", "fsdp_compile"]
    assert not any("error" in row for row in rows.values())
    assert rows["unsharded"]["between_bytes"] == 0.0
    # The split model's collectives are the program's: everyone sends the same.
    assert len({row["inside_bytes"] for row in rows.values()}) == 1
    assert 0.0 < rows["fsdp_compile"]["between_bytes"] <= 1.1 * rows["fsdp2"]["between_bytes"]
    assert all(0.0 < row["share_of_busy"] < 1.1 for row in rows.values())


@pytest.mark.long
def test_many_ranks_agree(tmp_path: Path) -> None:
    rows = _run("agreement", tmp_path)["results"]
    assert len({row["the last one"] for row in rows}) == len(rows) == 4
    assert all(row["requests_per_rank"] > 1 for row in rows)


@pytest.mark.long
def test_peak_memory_is_measured_and_predicted(tmp_path: Path) -> None:
    results = _run("memory", tmp_path, *_EAGER)["results"]
    size_bytes = parameter_bytes(llama(SMOKE).make())
    for row in results:
        assert row["held_bytes"] >= size_bytes / 8
        # Gradients of all shards are alive at the end of a step, beside the shards.
        assert row["peak_bytes"] >= row["held_bytes"] + size_bytes / 8
    ours = [row for row in results if row["contender"] == "fsdp_compile"]
    assert all(row["predicted_bytes"] > row["held_bytes"] for row in ours)
    held_to = [row for row in ours if "budget_bytes" in row]
    assert len(held_to) == 2
    assert all(row["predicted_bytes"] <= row["budget_bytes"] for row in held_to)
    # Of graphs that run operator by operator the prediction knows each allocation.
    assert all(row["peak_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.05) for row in ours)


@pytest.mark.long
def test_budgets_that_do_not_hold_activations_are_kept(tmp_path: Path) -> None:
    rows = _run("activations", tmp_path, "--lower", "eager")["results"]
    assert [row["budget"] for row in rows] == ["unlimited", "saved", "halfway", "least"]
    budgets = [row["budget_bytes"] for row in rows[1:]]
    assert budgets == sorted(budgets, reverse=True)
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in rows[1:])
    assert all(row["peak_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.05) for row in rows)


@_ALL
@pytest.mark.optional
@pytest.mark.inductor
@pytest.mark.parametrize("name", ["step_time", "compile_time", "first_step", "overhead", "scaling"])
def test_every_benchmark_runs(name: str, tmp_path: Path) -> None:
    assert _run(name, tmp_path)["results"]


@_ALL
@pytest.mark.optional
@pytest.mark.inductor
def test_predictions_stand_beside_measurements(tmp_path: Path) -> None:
    rows = _run("cost_model", tmp_path, "--fsdp-options", '{"lower": "eager"}')["results"]
    assert [row["what"] for row in rows] == [
        *("compute, roofline", "compute, measured", "step, roofline", "step, measured", "peak memory"),
        *("all-gather, 1 MB", "reduce-scatter, 1 MB"),
    ]
    for row in rows:
        assert row["prediction_error"] == pytest.approx(row["predicted"] / row["measured"] - 1)


@pytest.mark.long
@pytest.mark.optional
@pytest.mark.inductor
def test_what_a_gpu_runs_is_dry_run_on_a_cpu(tmp_path: Path) -> None:
    results = _run("gpu.run_all", tmp_path, "--device", "cpu")["results"]
    assert [part for part in results if "error" in part] == []


@_ALL
@pytest.mark.optional
@pytest.mark.inductor
def test_two_namespaces_train(tmp_path: Path) -> None:
    try:
        namespaces.check_available()
    except namespaces.UnavailableError as error:
        pytest.skip(str(error))
    rows = _by_name(_run("slow_network", tmp_path)["results"])
    assert rows["fsdp_compile"]["faster_than_fsdp2"] > 0


@pytest.mark.long
def test_saves_are_timed(tmp_path: Path) -> None:
    rows = _run("checkpoints", tmp_path)["results"]
    assert [row["contender"] for row in rows][::2] == ["dcp.save", "dcp.async_save"]
    assert all(0 < row["stands_still_s"] <= row["complete_s"] for row in rows)


@pytest.mark.long
def test_matrices_have_owners(tmp_path: Path) -> None:
    document = _run("matrix_optimizers", tmp_path)
    rows, settings = _by_name(document["results"]), document["settings"]
    assert rows["whole_step"]["updates"] == settings["matrices"]
    assert rows["everywhere"]["updates"] == settings["matrices"] * settings["ranks"]
    mine = rows["whole_step"]
    assert mine["least_bytes"] < mine["received_bytes"] < rows["everywhere"]["received_bytes"]


@pytest.mark.long
def test_every_configuration_of_a_drawn_case_trains(tmp_path: Path) -> None:
    rows = _run("fit", tmp_path)["results"]
    assert [row for row in rows if "error" in row] == []
    assert sum(row["chosen"] for row in rows) == 1


def test_all_benchmarks_exist_and_say_what_they_are() -> None:
    for name in BENCHMARKS:
        module = importlib.import_module(f"benchmarks.{name}")
        assert callable(module.main)
        assert module.__doc__


def test_a_number_that_json_has_not_is_a_text(tmp_path: Path) -> None:
    arguments = argparse.Namespace(benchmark="some", smoke=True, out=tmp_path / "result.json")
    assert finish(arguments, {}, [{"losses": [1.0, float("nan")], "rate": float("inf"), "ranks": 8}]) == 0
    assert json.loads(arguments.out.read_text())["results"] == [{"losses": [1.0, "nan"], "rate": "inf", "ranks": 8}]


def test_contenders_take_turns_and_a_failure_ends_one_only() -> None:
    calls: list[str] = []

    def fail() -> None:
        calls.append("b")
        if calls.count("b") == 3:
            raise ValueError("broken")

    samples = measure.alternate({"a": lambda: calls.append("a"), "b": fail}, rounds=2, warm_up=1)
    assert calls == ["a", "a", "b", "b", "a", "a", "b", "a", "a"]
    assert len(samples["a"].seconds) == 2
    assert samples["b"].error == "ValueError: broken (in fail)"
    assert samples["b"].to_dict() == {"error": "ValueError: broken (in fail)"}
