"""Programs with real frameworks on two processes: the sharded model trains to the numbers of DDP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = "tests.integrations.programs"

pytestmark = [pytest.mark.optional, pytest.mark.long]


def _run(program: str, folder: Path, *arguments: str) -> list[dict[str, float]]:
    """What a program reports that torchrun starts on two ranks."""
    file = folder / "report.json"
    file.unlink(missing_ok=True)
    launcher = ["torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", f"{PROGRAMS}.{program}", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "REPORT": str(file), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, float]] = json.loads(file.read_text())
    assert found
    return found


def _same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)


def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    expected = _run("with_trainer", tmp_path, "ddp", "by_ddp")
    found = _run("with_trainer", tmp_path, "fsdp", "sharded")
    assert any("eval_loss" in entry for entry in expected)
    assert any("grad_norm" in entry for entry in expected)
    _same(found, expected)
    _same(_run("with_trainer", tmp_path, "fsdp", "replicated"), expected)
    weights = tmp_path / "sharded" / "checkpoint-4" / "model.safetensors"
    assert weights.stat().st_size == (tmp_path / "by_ddp" / "checkpoint-4" / "model.safetensors").stat().st_size
    # The Trainer reads the log of the first two steps from the checkpoint, and repeats the others.
    resumed = _run("with_trainer", tmp_path, "fsdp", "sharded", "0", "sharded/checkpoint-2")
    assert resumed == found


def test_trainer_smooths_the_labels_of_the_next_tokens(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    _same(*(_run("with_trainer", tmp_path, how, how, "0.1") for how in ("fsdp", "ddp")))


@pytest.mark.parametrize("loss", ["nll", "dft", "whole_logits"])
def test_trl(tmp_path: Path, loss: str) -> None:
    pytest.importorskip("trl")
    expected = _run("with_trl", tmp_path, "ddp", loss, "no", "by_ddp")
    found = _run("with_trl", tmp_path, "fsdp", loss, "no", "sharded")
    assert any("eval_loss" in entry for entry in expected)
    assert any("mean_token_accuracy" in entry for entry in expected)
    _same(found, expected)


@pytest.mark.parametrize("kind", ["dpo", "reward", "grpo"])
def test_trl_preferences(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("trl")
    expected = _run("with_trl_preferences", tmp_path, "ddp", kind, "by_ddp")
    assert all("loss" in entry for entry in expected[:3])
    _same(_run("with_trl_preferences", tmp_path, "fsdp", kind, "sharded"), expected)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate(tmp_path: Path, mixed_precision: str) -> None:
    pytest.importorskip("accelerate")
    expected = _run("with_accelerate", tmp_path, "ddp", mixed_precision)
    _same(_run("with_accelerate", tmp_path, "fsdp", mixed_precision), expected)


@pytest.mark.parametrize(
    ("how", "mixed_precision", "state_dict_type", "tied"),
    [("in_place", "no", "FULL_STATE_DICT", "tied"), ("function", "bf16", "SHARDED_STATE_DICT", "untied")],
)
def test_accelerate_fsdp2(tmp_path: Path, how: str, mixed_precision: str, state_dict_type: str, tied: str) -> None:
    pytest.importorskip("accelerate")
    arguments = (mixed_precision, state_dict_type, tied)
    expected = _run("with_accelerate_fsdp2", tmp_path, "fsdp2_compiled", *arguments)
    assert expected[2:4] == expected[4:6]  # what was loaded trains on as what was saved did
    # The same bits as FSDP2's under torch.compile, without which some operators round otherwise.
    assert _run("with_accelerate_fsdp2", tmp_path, how, *arguments) == expected


def test_peft(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    expected = _run("with_peft", tmp_path, "ddp", "by_ddp")
    _same(_run("with_peft", tmp_path, "fsdp", "sharded"), expected)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric(tmp_path: Path, precision: str) -> None:
    pytest.importorskip("lightning")
    expected = _run("with_fabric", tmp_path, "ddp", precision, str(tmp_path))
    _same(_run("with_fabric", tmp_path, "fsdp", precision, str(tmp_path)), expected)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_trainer(tmp_path: Path, precision: str) -> None:
    pytest.importorskip("lightning")
    expected = _run("with_lightning", tmp_path, "ddp", precision, "by_ddp")
    found = _run("with_lightning", tmp_path, "fsdp", precision, "sharded")
    assert sum("val_loss" in entry for entry in expected) == 2
    _same(found, expected)
    # Its checkpoint has the optimizer, too: the second epoch is the same again.
    resumed = _run("with_lightning", tmp_path, "fsdp", precision, "resumed", "sharded/epoch=0.ckpt")
    assert resumed == found[9:]


@pytest.mark.parametrize(
    ("model", "optimizer", "clip_mode"),
    [("vit_tiny_patch16_224", "adamw", "norm"), ("convnext_atto", "lamb", "norm"), ("resnet10t", "sgd", "value")],
)
def test_timm(tmp_path: Path, model: str, optimizer: str, clip_mode: str) -> None:
    pytest.importorskip("timm")
    expected = _run("with_timm", tmp_path, "fsdp2", model, optimizer, clip_mode, str(tmp_path))
    assert sum("loss" in entry for entry in expected) == 4
    assert sum("averaged" in entry for entry in expected) == 1
    # Not DDP: optimizers round the last elements of a tensor in other ways, and batch norm of two rows amplifies it.
    assert _run("with_timm", tmp_path, "fsdp", model, optimizer, clip_mode, str(tmp_path)) == expected


def test_distributed_config(tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed")
    # The same bits as FSDP2's, by which transformers has sharded the model.
    expected = _run("with_distributed_config", tmp_path, "fsdp2")
    assert _run("with_distributed_config", tmp_path, "fsdp") == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torchtitan(tmp_path: Path, dtype: str) -> None:
    for module in ("torchtitan", "triton", "tyro", "spmd_types"):  # torchtitan imports the others without naming them
        pytest.importorskip(module)
    # The same bits as FSDP2's, which torchtitan trains with.
    assert _run("with_torchtitan", tmp_path, "fsdp", dtype) == _run("with_torchtitan", tmp_path, "fsdp2", dtype)
