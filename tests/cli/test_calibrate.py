"""`fsdp-compile calibrate`, alone and below torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_compile.cli.main import main
from fsdp_compile.cost.calibrated import load_hardware


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_alone_it_measures_the_device_and_explain_takes_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hardware.json"
    assert main(["calibrate", "--device", "cpu", "--seconds", "1", "--out", str(path)]) == 0
    said = capsys.readouterr().out
    assert "matmuls of float32" in said
    assert f"wrote {path}" in said
    assert load_hardware(path).cluster is not None


@pytest.mark.long
def test_below_torchrun_all_ranks_measure_and_one_of_each_host_writes(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ours = ["-m", "fsdp_compile.cli", "calibrate", "--device", "cpu", "--seconds", "2", "--out", str(path)]
    command = [*launcher, *ours]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote ") == 1
    assert "all-reduce over 2 ranks, 2 on one host" in done.stdout
    there = load_hardware(path)
    assert there.cluster is not None
    assert (there.cluster.ranks, there.local_size) == (2, 2)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["calibrate", "--seconds", "0"], "cannot measure for 0.0 s"),
        (["calibrate", "--seconds", "nan"], "cannot measure for nan s"),
        (["calibrate", "--seconds", "inf"], "cannot measure for inf s"),
        (["calibrate", "--out", "tests"], "tests is a folder"),
        (["calibrate", "--out", "nowhere/hardware.json"], "there is no folder nowhere"),
        (["explain", "--hardware", "nowhere.json"], "there is no file nowhere.json"),
        (["explain", "--hardware", "pyproject.toml", "--link", "5"], "the file says which device and links there are"),
        (["explain", "--ranks-per-host", "0"], "0 ranks"),
    ],
)
def test_mistakes_are_explained(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert says in capsys.readouterr().err
