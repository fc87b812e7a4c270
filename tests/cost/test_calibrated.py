"""The file of a calibration: what plans take of it, and files that are none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_compile.cost.calibrated import Calibration, load_hardware, refuse_elsewhere, this_cluster
from fsdp_compile.cost.hardware import Cluster, MeasuredCollective
from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.hosts import GroupRanks
from fsdp_compile.options import FSDPOptions

CLUSTER = Cluster(device_type="cuda", device="NVIDIA H100 80GB HBM3", ranks=16, ranks_per_host=8, torch="2.13.0")


def _table(kind: str, ranks: int, on_one_host: int, gb_per_s: float) -> MeasuredCollective:
    points = tuple((size, 30.0 + size / gb_per_s / 1e3) for size in (1e3, 1e6, 1e9))
    return MeasuredCollective(kind, ranks, points, on_one_host)


FOUND = Calibration(
    cluster=CLUSTER,
    matmul={"bfloat16": 494.7e12, "float32": 40e12},
    memory_bytes_per_s=3e12,
    host_bytes_per_s=50e9,
    memory_bytes=79e9,
    collectives=(
        _table("all-gather", 16, 8, 300.0),
        _table("reduce-scatter", 16, 8, 280.0),
        _table("all-gather", 8, 8, 350.0),
        _table("all-gather", 2, 1, 35.0),
    ),
)


def _written(folder: Path, text: str) -> Path:
    path = folder / "cluster.json"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.core
def test_the_file_is_read_back_and_names_itself_as_the_source(tmp_path: Path) -> None:
    assert Calibration.of_text(FOUND.to_text()) == FOUND
    there = load_hardware(_written(tmp_path, FOUND.to_text()))
    assert (there.device.name, there.local_size) == (CLUSTER.device, 8)
    assert (there.device.near.name, there.link.name) == ("nvlink4", "ib-400")
    device = there.device
    matmul = device.matmul[torch.bfloat16]
    for quantity in (device.memory_rate, device.memory, matmul, device.near.rate, there.link.hop):
        assert "measured, cluster.json" in quantity.source
    assert device.flops_per_s(torch.bfloat16) == 494.7e12
    assert device.flops_per_s(torch.float32) == 40e12
    # What was not measured reaches as much of its peak as bfloat16 did: a half.
    assert device.flops_per_s(torch.float8_e4m3fn) == pytest.approx(1978.9e12 / 2)
    assert (device.bytes_per_s, device.memory.value, device.host.bytes_per_s) == (3e12, 79e9, 50e9)


def test_groups_that_were_measured_take_their_times_and_others_what_fits_them(tmp_path: Path) -> None:
    there = load_hardware(_written(tmp_path, FOUND.to_text()))
    us = there.collective_us
    assert us("all-gather", 1e6, GroupRanks(16)) == pytest.approx(30 + 1e6 / 300e3)
    assert us("reduce-scatter", 1e6, GroupRanks(16)) == pytest.approx(30 + 1e6 / 280e3)
    assert us("all-gather", 1e6, GroupRanks(8)) == pytest.approx(30 + 1e6 / 350e3)
    assert us("all-gather", 1e6, GroupRanks(2, stride=8)) == pytest.approx(30 + 1e6 / 35e3)
    # Of 300 GB/s that eight ports have together, one has an eighth, and half of a host's ranks have half.
    assert there.bytes_per_s(GroupRanks(8, stride=4)) == pytest.approx(300e9 / 8 * 2)
    assert there.bytes_per_s(GroupRanks(4)) == pytest.approx(350e9)
    assert us("all-reduce", 0.0, GroupRanks(16)) == pytest.approx(30.0, rel=0.01)


def test_a_rank_alone_says_nothing_of_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = dataclasses.replace(CLUSTER, ranks=1, ranks_per_host=1)
    there = load_hardware(_written(tmp_path, dataclasses.replace(FOUND, cluster=alone, collectives=()).to_text()))
    assert there.local_size == 8
    assert there.bytes_per_s(GroupRanks(64)) == pytest.approx(323e9)


def _changed(**fields: Any) -> str:
    return json.dumps({**json.loads(FOUND.to_text()), **fields})


TEXT = FOUND.to_text()
DAMAGED = {
    "cut off": TEXT[: len(TEXT) // 2],
    "empty": "",
    "other JSON": '{"cpu": {"aten.mm": 3.0}}',
    "a list": "[1, 2]",
    "other version": _changed(what="fsdp-compile calibrate, 0"),
    "negative rate": _changed(memory_bytes_per_s=-1.0),
    "not a number": _changed(memory_bytes="many"),
    "infinite": TEXT.replace("3000000000000.0", "Infinity"),
    "no matmul": _changed(matmul={}),
    "unknown dtype": _changed(matmul={"bfloat17": 1.0}),
    "unknown field": _changed(color="red"),
    "field missing": json.dumps({k: v for k, v in json.loads(TEXT).items() if k != "matmul"}),
    "other cluster": _changed(cluster={"device": "x"}),
    "no table": _changed(collectives=[{"kind": "all-gather"}]),
    "one point": _changed(collectives=[{"kind": "all-gather", "ranks": 2, "points": [[1, 2]], "on_one_host": 1}]),
    "falling": _changed(
        collectives=[{"kind": "all-gather", "ranks": 2, "points": [[1, 2.0], [2, 1.0]], "on_one_host": 1}]
    ),
    "kind": _changed(collectives=[{"kind": "send", "ranks": 2, "points": [[1, 2.0], [2, 3.0]], "on_one_host": 1}]),
    "hosts": _changed(collectives=[{"kind": "all-gather", "ranks": 2, "points": [[1, 2], [2, 3]], "on_one_host": 3}]),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_file_that_is_none_is_named(kind: str, tmp_path: Path) -> None:
    path = _written(tmp_path, DAMAGED[kind])
    with pytest.raises(ConfigError, match=r"cluster\.json is no file of measured hardware"):
        load_hardware(path)


def test_an_option_takes_the_path_and_names_a_file_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _written(tmp_path, TEXT)
    monkeypatch.chdir(tmp_path)
    assert FSDPOptions.from_dict({"hardware": path.name}).planned_for == load_hardware(path)
    assert FSDPOptions.from_dict({"hardware": str(path)}).planned_for == load_hardware(path)
    assert FSDPOptions.from_dict({"hardware": path}).planned_for == load_hardware(path)
    with pytest.raises(ConfigError, match=r"nowhere\.json is no file(?s:.)*FileNotFoundError"):
        FSDPOptions.from_dict({"hardware": tmp_path / "nowhere.json"})
    with pytest.raises(ConfigError, match="no effect on a schedule"):
        FSDPOptions.from_dict({"hardware": path, "prefetch": 1})


def test_times_of_another_cluster_are_refused_where_they_would_be_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    here = this_cluster("cpu", 4)
    assert (here.ranks, here.ranks_per_host, here.torch) == (4, 2, torch.__version__)
    refuse_elsewhere(None, "cpu", 4)
    for change in ({}, {"ranks": 8}, {"ranks_per_host": 4}, {"torch": "2.0.0"}, {"device": "another"}):
        found = dataclasses.replace(FOUND, cluster=dataclasses.replace(here, **change), collectives=())
        there = load_hardware(_written(tmp_path, found.to_text()))
        if not change:
            refuse_elsewhere(there, "cpu", 4)
            continue
        with pytest.raises(ConfigError, match=r"cluster\.json was measured elsewhere: on .* ranks, .* per host"):
            refuse_elsewhere(there, "cpu", 4)
