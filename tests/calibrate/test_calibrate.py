"""Real ranks measure themselves, agree on the numbers, and plan with the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compile import RankMismatchError
from fsdp_compile.calibrate import calibrate, save
from fsdp_compile.cost.calibrated import KINDS, load_hardware
from fsdp_compile.errors import ConfigError
from fsdp_compile.explain import explain
from tests.models.kinds import Slim
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def _measured(local: int, folder: str) -> str:
    """The text of the calibration of this rank, whose host has `local` ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(local))
        found = calibrate(CPU, seconds=0.1)
    if dist.get_rank() == 0:
        save(found, Path(folder) / "hardware.json")
    return found.to_text()


@pytest.mark.core
def test_two_ranks_agree_on_what_they_measure(tmp_path: Path) -> None:
    first, second = run_ranks(_measured, 2, str(tmp_path))
    assert first == second == (tmp_path / "hardware.json").read_text(encoding="utf-8")
    found = json.loads(first)
    assert [(t["kind"], t["ranks"], t["on_one_host"]) for t in found["collectives"]] == [(k, 2, 2) for k in KINDS]
    assert (found["cluster"]["ranks"], found["cluster"]["ranks_per_host"]) == (2, 2)
    # An all-reduce sends twice what the others do.
    sent = {t["kind"]: t["points"][0][0] for t in found["collectives"]}
    assert sent == {"all-gather": 2048, "reduce-scatter": 2048, "all-reduce": 4096}
    there = load_hardware(tmp_path / "hardware.json")
    assert len(there.device.near.measured) == 3
    assert there.link.measured == ()


@pytest.mark.long
def test_four_ranks_on_two_hosts_measure_hosts_and_what_is_between_them(tmp_path: Path) -> None:
    texts = run_ranks(_measured, 2, str(tmp_path), world_size=4)
    assert len(set(texts)) == 1
    tables = json.loads(texts[0])["collectives"]
    assert {(t["ranks"], t["on_one_host"]) for t in tables} == {(4, 2), (2, 2), (2, 1)}
    there = load_hardware(tmp_path / "hardware.json")
    assert {table.ranks for table in there.device.near.measured} == {2}
    assert {(table.ranks, table.on_one_host) for table in there.link.measured} == {(4, 2), (2, 1)}


def test_a_rank_alone_measures_what_its_device_reaches(tmp_path: Path) -> None:
    found = calibrate(CPU, seconds=0.1)
    assert found.collectives == ()
    assert found.matmul.keys() == {"bfloat16", "float32"}
    save(found, tmp_path / "hardware.json")
    plan = explain(
        Slim(), torch.ones(4, 32), world_size=4, options={"lower": "eager", "hardware": tmp_path / "hardware.json"}
    )
    assert plan.hardware == load_hardware(tmp_path / "hardware.json")
    assert all("measured, hardware.json" in number.source for number in plan.numbers if number.what == "memory rate")
    assert "measured, hardware.json" in " ".join(str(plan).split())
    with pytest.raises(ConfigError, match="cannot write"):
        save(found, tmp_path / "nowhere" / "hardware.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        save(found, tmp_path / "folder")
    assert {path.name for path in tmp_path.iterdir()} == {"hardware.json", "folder"}


def _step(file: str | None) -> list[float]:
    """Losses with a file, in whose name `RANK` stands for this rank, or without one."""
    options: Any = {"lower": "eager"}
    if file is not None:
        options["hardware"] = Path(file.replace("RANK", str(dist.get_rank())))
    model = torch.compile(Slim(), backend="fsdp", options=options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        loss = model(torch.ones(4, 32)).sum()
        loss.backward()
    return [loss.item()]


def _refused(file: str) -> tuple[str, str]:
    with pytest.raises(Exception, match=r"measured") as caught:
        _step(file)
    error = getattr(caught.value, "inner_exception", caught.value)
    return type(error).__name__, str(error)


@pytest.mark.core
def test_ranks_train_with_the_file_and_refuse_different_or_foreign_ones(tmp_path: Path) -> None:
    text, _ = run_ranks(_measured, 2, str(tmp_path))
    assert run_ranks(_step, str(tmp_path / "hardware.json")) == run_ranks(_step, None)

    other = json.loads(text)
    other["memory_bytes_per_s"] *= 2
    for rank, content in enumerate((text, json.dumps(other))):
        (tmp_path / f"of_{rank}.json").write_text(content, encoding="utf-8")
    for name, message in run_ranks(_refused, str(tmp_path / "of_RANK.json")):
        assert name == RankMismatchError.__name__
        assert "rank 0 and rank 1 compile with different options" in message
        assert "hardware=measured times" in message

    other["cluster"]["ranks"] = 64
    (tmp_path / "foreign.json").write_text(json.dumps(other), encoding="utf-8")
    for name, message in run_ranks(_refused, str(tmp_path / "foreign.json")):
        assert name == ConfigError.__name__
        assert "foreign.json was measured elsewhere: on 64 ranks, 2 per host" in message
