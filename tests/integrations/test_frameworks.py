"""Programs with real frameworks on two processes: the sharded model trains to the numbers of DDP, or of FSDP2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.programs import run_program

pytestmark = [pytest.mark.optional, pytest.mark.long]


def _run(program: str, folder: Path, *arguments: str) -> list[dict[str, float]]:
    """What a program reports on two ranks."""
    file = folder / "report.json"
    file.unlink(missing_ok=True)
    run_program(f"tests.integrations.programs.{program}", folder, *arguments, REPORT=str(file))
    found: list[dict[str, float]] = json.loads(file.read_text())
    assert found
    return found


def _same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)


def _import(*modules: str) -> None:
    for module in modules:
        pytest.importorskip(module)


@pytest.mark.parametrize(
    ("package", "program", "arguments", "must_report"),
    [
        *(
            ("trl", "with_trl", (loss,), ("eval_loss", "mean_token_accuracy"))
            for loss in ("nll", "dft", "whole_logits")
        ),
        *(("trl", "with_trl_preferences", (kind,), ("loss",)) for kind in ("dpo", "reward", "grpo")),
        *(("accelerate", "with_accelerate", (precision,), ("loss", "norm")) for precision in ("no", "bf16")),
        ("accelerate", "with_trainer", ("smoothed", "0.1"), ("loss", "eval_loss", "grad_norm")),
        ("peft", "with_peft", (), ("loss",)),
        *(("lightning", "with_fabric", (precision,), ("loss", "norm")) for precision in ("32-true", "bf16-mixed")),
    ],
)
def test_the_numbers_are_those_of_ddp(
    tmp_path: Path, package: str, program: str, arguments: tuple[str, ...], must_report: tuple[str, ...]
) -> None:
    _import(package)
    expected = _run(program, tmp_path, "ddp", *arguments)
    assert {name for entry in expected for name in entry} >= set(must_report)
    _same(_run(program, tmp_path, "fsdp", *arguments), expected)


@pytest.mark.parametrize(
    ("packages", "program", "arguments"),
    [
        # Optimizers round the last elements of DDP's tensors in other ways, and batch norm of two rows amplifies it.
        (("timm",), "with_timm", ("vit_tiny_patch16_224", "adamw", "norm")),
        (("timm",), "with_timm", ("convnext_atto", "lamb", "norm")),
        (("timm",), "with_timm", ("resnet10t", "sgd", "value")),
        # By FSDP2 transformers has sharded the model.
        (("transformers.distributed",), "with_distributed_config", ()),
        # torchtitan imports the others without naming them.
        (("torchtitan", "triton", "tyro", "spmd_types"), "with_torchtitan", ("float32",)),
        (("torchtitan", "triton", "tyro", "spmd_types"), "with_torchtitan", ("bfloat16",)),
    ],
)
def test_the_bits_are_those_of_fsdp2(
    tmp_path: Path, packages: tuple[str, ...], program: str, arguments: tuple[str, ...]
) -> None:
    _import(*packages)
    expected = _run(program, tmp_path, "fsdp2", *arguments)
    assert sum("loss" in entry for entry in expected) == 4
    assert _run(program, tmp_path, "fsdp", *arguments) == expected


def test_trainer_with_checkpoints(tmp_path: Path) -> None:
    _import("accelerate")
    expected = _run("with_trainer", tmp_path, "ddp", "by_ddp")
    found = _run("with_trainer", tmp_path, "fsdp", "sharded")
    _same(found, expected)
    _same(_run("with_trainer", tmp_path, "fsdp", "replicated"), expected)
    weights = tmp_path / "sharded" / "checkpoint-4" / "model.safetensors"
    assert weights.stat().st_size == (tmp_path / "by_ddp" / "checkpoint-4" / "model.safetensors").stat().st_size
    # The Trainer reads the log of the first two steps from the checkpoint, and repeats the others.
    resumed = _run("with_trainer", tmp_path, "fsdp", "sharded", "0", "sharded/checkpoint-2")
    assert resumed == found


@pytest.mark.parametrize(
    ("how", "mixed_precision", "state_dict_type", "tied"),
    [("in_place", "no", "FULL_STATE_DICT", "tied"), ("function", "bf16", "SHARDED_STATE_DICT", "untied")],
)
def test_accelerate_fsdp2(tmp_path: Path, how: str, mixed_precision: str, state_dict_type: str, tied: str) -> None:
    _import("accelerate")
    arguments = (mixed_precision, state_dict_type, tied)
    expected = _run("with_accelerate_fsdp2", tmp_path, "fsdp2_compiled", *arguments)
    assert expected[2:4] == expected[4:6]  # what was loaded trains on as what was saved did
    # The same bits as FSDP2's under torch.compile, without which some operators round otherwise.
    assert _run("with_accelerate_fsdp2", tmp_path, how, *arguments) == expected


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_trainer(tmp_path: Path, precision: str) -> None:
    _import("lightning")
    expected = _run("with_lightning", tmp_path, "ddp", precision, "by_ddp")
    found = _run("with_lightning", tmp_path, "fsdp", precision, "sharded")
    assert sum("val_loss" in entry for entry in expected) == 2
    _same(found, expected)
    # Its checkpoint has the optimizer, too: the second epoch is the same again.
    resumed = _run("with_lightning", tmp_path, "fsdp", precision, "resumed", "sharded/epoch=0.ckpt")
    assert resumed == found[9:]
