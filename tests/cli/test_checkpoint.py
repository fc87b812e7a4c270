"""`fsdp-compile checkpoint` on files of every format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fsdp_compile.cli.checkpoint import step_folders
from fsdp_compile.cli.main import main
from tests.formats.samples import save_steps


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.pt"
    weight = torch.ones(3, 2)
    torch.save({"model": {"weight": weight, "tied": weight, "scale": torch.tensor(1.0).bfloat16()}, "epoch": 3}, path)
    return path


def test_info_shows_what_is_in_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "info", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: a file of torch.save",
        "3 tensors, 1 other value, 26 bytes (24 bytes float32, 2 bytes bfloat16), 1 file",
        "model.weight  [3, 2]  float32",
        "model.tied    [3, 2]  float32, tied to model.weight",
        "model.scale   []      bfloat16",
        "epoch                 no tensor",
    ]


def test_info_as_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "info", "--json", str(file)]) == 0
    (read,) = json.loads(capsys.readouterr().out)
    assert (read["format"], read["bytes"], read["files"]) == ("torch", 26, ["a.pt"])
    assert read["tensors"][1] == {
        "name": "model.tied",
        "shape": [3, 2],
        "dtype": "float32",
        "bytes": 24,
        "tied_to": "model.weight",
    }
    assert read["others"] == ["epoch"]


def test_info_is_a_table_on_a_terminal(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["checkpoint", "info", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("model.tied" in line and "[3, 2]" in line and "tied to" in line for line in lines)


def test_the_steps_of_a_run_are_found_in_its_folder(tmp_path: Path) -> None:
    steps = [tmp_path / "checkpoints" / f"step-{number}" for number in (9, 10)]
    for step in steps:
        step.mkdir(parents=True)
    assert step_folders(tmp_path) == step_folders(tmp_path / "checkpoints") == steps


@pytest.mark.long
def test_the_steps_of_a_run_are_shown_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_steps(tmp_path)
    assert main(["checkpoint", "info", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"{tmp_path}/step-000001: a step of fsdp-compile train, torch.distributed.checkpoint" in shown
    assert "steps that were done: 2\n" in shown
    assert main(["checkpoint", "verify", "--finite", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path}/step-000001 is right: 8 tensors, ")
    assert first.endswith(", digests and checksums, all values finite")
    assert second.startswith(f"{tmp_path}/step-000002 is right: ")
    (tmp_path / "step-000001" / "__0_0.distcp").write_bytes(b"")
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    after = capsys.readouterr()
    assert f"{tmp_path}/step-000001/__0_0.distcp has 0 bytes" in after.err
    assert after.out.startswith(f"{tmp_path}/step-000002 is right: ")


def test_convert_says_what_it_wrote_and_left_out(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = file.parent / "hf"
    command = ["checkpoint", "convert", str(file), str(target), "--to", "safetensors"]
    assert main(command) == 2
    assert "instead: --part model" in capsys.readouterr().err
    assert main([*command, "--part", "model", "--dtype", "bfloat16", "--prefix", "all."]) == 0
    assert capsys.readouterr().out == f"wrote {target}: 3 tensors, 14 bytes\n"
    assert main(["checkpoint", "info", str(target)]) == 0
    assert "all.tied    [3, 2]  bfloat16, tied to all.weight" in capsys.readouterr().out
    assert main(command) == 2
    assert f"{target} exists" in capsys.readouterr().err


def test_an_unknown_option_is_refused_with_the_nearest(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["checkpoint", "convert", str(file), str(file.parent / "b"), "--to", "dcp", "--strip-prefx", "a."]
    assert main(command) == 2
    shown = capsys.readouterr().err
    assert "unknown argument --strip-prefx" in shown
    assert "instead: --strip-prefix" in shown


def test_safetensors_that_are_not_installed_are_named(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_compile.cli.checkpoint.find_spec", lambda _: None)
    command = ["checkpoint", "convert", str(file), str(file.parent / "b"), "--to", "safetensors", "--part", "model"]
    assert main(command) == 2
    assert "pip install 'fsdp-compile[safetensors]'" in capsys.readouterr().err
