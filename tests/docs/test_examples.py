"""`docs/examples` and the README's code run: as they are, or without Inductor, which is faster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import run_program

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
BLOCK = re.compile(r"```python\n(.*?)```", flags=re.DOTALL)
CODE = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
GUIDE = BLOCK.findall((ROOT / "docs" / "guide.md").read_text(encoding="utf-8"))
RANKS = {
    "own_model": 2,
    "hsdp_bf16": 4,
    "meta_safetensors": 2,
    "read_graphs": 2,
    "tensor_parallel": 4,
    "muon": 2,
    "fp16_tools": 2,
    "fsdp1_state": 2,
    "profile_step": 2,
    "resume": 4,
}
"""Scripts that ranks of the pool run, and on how many."""
OF_A_FRAMEWORK = {
    "hf_trainer": "accelerate",
    "with_accelerate": "accelerate",
    "with_lightning": "lightning",
    "lora": "peft",
}
"""Others on two ranks, and the package that each needs."""
TRAIN = ("own_model", "hsdp_bf16", "meta_safetensors", "tensor_parallel", "muon", "fp16_tools", "fsdp1_state")
LOSSES = re.compile(r"loss ([\d.]+) -> ([\d.]+)")


def _run(code: str, folder: Path, ranks: int) -> str:
    """What the first rank prints."""
    script = folder / "script.py"
    script.write_text(code.replace('backend="fsdp")', 'backend="fsdp", options={"lower": "eager"})'), encoding="utf-8")
    return run_program(str(script), folder, ranks=ranks)


def _start(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _falls(printed: str) -> bool:
    (before, after) = LOSSES.findall(printed)[-1]
    return float(after) < float(before)


def test_every_example_is_run_and_listed() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == {*RANKS, *OF_A_FRAMEWORK, "parity"}
    listed = re.findall(r"\(([a-z_0-9]+)\.py\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(scripts)
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 67 for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", TRAIN)
def test_an_example_trains(name: str, tmp_path: Path) -> None:
    assert _falls(_run((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"), tmp_path, RANKS[name]))


def test_the_all_gather_of_layer_1_is_found(tmp_path: Path) -> None:
    gather, wait = _run((EXAMPLES / "read_graphs.py").read_text(encoding="utf-8"), tmp_path, 2).splitlines()
    assert "all_gather_into_tensor" in gather
    assert "wait_tensor" in wait


def test_a_step_is_compared_with_its_plan(tmp_path: Path) -> None:
    assert "exposed communication" in _run((EXAMPLES / "profile_step.py").read_text(encoding="utf-8"), tmp_path, 2)


def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    code = (EXAMPLES / "resume.py").read_text(encoding="utf-8")
    first, second = (_run(code, tmp_path, ranks) for ranks in (4, 2))
    assert "4 ranks, step 5" in first
    assert "2 ranks, step 10" in second
    assert _falls(f"loss {LOSSES.findall(first)[0][0]} -> {LOSSES.findall(second)[0][0]}")
    assert _falls(second)


def test_the_readmes_code_runs(tmp_path: Path) -> None:
    """The script; the lines that save and load and those of the guide, which continue it; the lines that shard it."""
    script, sharded, saved = CODE
    printed = _run("\n".join([script, saved, *GUIDE]), tmp_path, 2)
    losses = re.findall(r"step \d+: loss ([\d.]+)", printed)
    assert len(losses) == 20
    assert float(losses[-1]) < float(losses[0])
    assert (tmp_path / "model.pt").exists()
    line = re.search(r"compiled = .*\n", script)
    assert line is not None
    assert "(2, 4)" in sharded
    by_hand = script.replace(line[0], sharded.replace("(2, 4)", "(2, 1)"))
    assert "step 19" in _run(by_hand, tmp_path, 2)
    blocks = """compiled = torch.compile(model, backend="fsdp", options={"regions": "blocks", "lower": "eager"})\n"""
    assert "step 19" in _run(script.replace(line[0], blocks), tmp_path, 2)


@pytest.mark.inductor
@pytest.mark.long
def test_the_readmes_script_runs_as_pasted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CODE[0], encoding="utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"]
    assert "step 19" in _start([*torchrun, "train.py"], tmp_path)


@pytest.mark.inductor
@pytest.mark.long
@pytest.mark.parametrize("name", [*RANKS, *OF_A_FRAMEWORK])
def test_an_example_runs_as_it_is(name: str, tmp_path: Path) -> None:
    if package := OF_A_FRAMEWORK.get(name):
        pytest.importorskip(package)
    printed = run_program(str(EXAMPLES / f"{name}.py"), tmp_path, ranks=RANKS.get(name, 2))
    assert {"read_graphs": "role=gather", "profile_step": "measured"}.get(name, "loss") in printed


@pytest.mark.inductor
@pytest.mark.long
def test_a_script_compares_the_readers_model(tmp_path: Path) -> None:
    """It starts its ranks by itself."""
    assert "equal" in _start([str(EXAMPLES / "parity.py")], tmp_path)
