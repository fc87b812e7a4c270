"""`fsdp-compile train` as a user types it: help, and one readable message for every mistake."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from fsdp_compile.cli.main import main
from fsdp_compile.training.checkpoint_folder import CheckpointFolder
from fsdp_compile.training.config import TrainConfig, flag
from fsdp_compile.training.job import Run


@pytest.fixture(autouse=True)
def _work_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    Path("text").write_bytes(b"some text " * 100)
    Path("short").write_bytes(b"some text")
    Path("a-run").mkdir()
    options = TrainConfig(data="text", seq_len=8)
    Run(options=options, text_fingerprint="another text", run="the run").write(Path("a-run"))


def _refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match=r"^2$"):  # as the console script ends, and argparse by itself
        sys.exit(main(["train", *arguments]))
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert printed.out == ""
    return printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "abc"], "argument --steps: invalid int value: 'abc'"),
        (["--batch-sise", "8"], "unknown argument --batch-sise\n  instead: --batch-size"),
        (["--bogus"], "unknown argument --bogus\n  instead: see train --help"),
        (["surplus"], "unknown argument surplus\n  instead: see train --help"),
        (["--mixed-precision", "fp8"], "invalid choice: 'fp8' (choose from"),
        (["--device", "tpu"], "invalid choice: 'tpu' (choose from"),
        (["--ranks", "0"], "there cannot be 0 ranks\n  where: --ranks\n  instead: 1 or more"),
        (
            ["--ranks", "3"],
            "3 ranks cannot share 16 sequences evenly\n  where: --batch-size\n  instead: a multiple of 3",
        ),
        (["--learning-rate", "-1"], "-1.0 is out of bounds\n  where: --learning-rate\n  instead: a number above 0"),
        (["--warmup-ratio", "nan"], "nan is out of bounds\n  where: --warmup-ratio\n  instead: a finite number"),
        (["--heads", "5"], "5 heads do not split 128 features into even parts\n  where: --width, --heads"),
        (["--data", "nowhere"], "there is no file or folder nowhere\n  where: --data"),
        (["--data", "short"], "the text has 10 bytes; sequences of 256 need 5140\n  where: --data (short), --seq-len"),
        (["--data", "text", "--seq-len", "8", "--out", "a-run"], "there is a run in a-run already\n  where: --out"),
        (["--data", "text", "--seq-len", "8", "--out", "text"], "text is a file\n  where: --out"),
        (["--data", "text", "--seq-len", "8", "--out", "text/run"], "text is a file\n  where: --out"),
        (["--data", "text", "--seq-len", "8", "--device", "cuda", "--ranks", "16"], "16 ranks need a GPU each and"),
        (["--data", ".", "--seq-len", "8"], "is inside of the text, ., which would change with it"),
        (["--data", "a-run", "--out", "a-run/b", "--seq-len", "8"], "the run's folder a-run/b is inside of the text"),
        (["--data", "text", "--seq-len", "8", "--timeout", "1e300"], "1e+300 is out of bounds\n  where: --timeout"),
        (["--resume"], "a-run holds no complete checkpoint"),
        (["--resume", "nowhere"], "there is no run in nowhere\n  where: --resume"),
        (["--resume", "a-run", "--out", "b"], "a resumed run stays in its folder\n  where: --out"),
        (["--resume", "a-run", "--width", "64"], "the run was started with 128"),
        (["--resume", "broken"], "broken/config.json is damaged"),
    ],
)
def test_a_mistake_gets_one_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir()
    Path("runs/a-run").symlink_to(Path("a-run").absolute())
    Path("broken").mkdir()
    Path("broken/config.json").write_text('{"options":')
    error = _refused(arguments, capsys)
    assert message in error
    assert error.count("fsdp-compile train: ") == 1


def test_there_may_be_no_run_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no run to resume below runs" in _refused(["--resume"], capsys)


@pytest.mark.parametrize(
    ("steps", "message"), [(4, "has already done its 4 steps"), (9, "the text is not that which the run began with")]
)
def test_a_checkpoint_may_not_fit(steps: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = CheckpointFolder(Path("a-run/checkpoints"), "the run")
    checkpoints.begin()
    checkpoints.finish(4, {}, keep=1)
    Path("a-run/checkpoints/step-best").mkdir()  # the user's
    Path("a-run/checkpoints/step-000009").mkdir()
    assert message in _refused(["--resume", "a-run", "--steps", str(steps)], capsys)


def test_below_a_launcher_the_number_of_ranks_is_not_asked_for_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert "the launcher has started 4 ranks, not 2" in _refused(["--ranks", "2"], capsys)


def test_one_rank_of_each_host_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert _refused(["--steps", "0"], capsys) == ""
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "0 is out of bounds" in _refused(["--steps", "0"], capsys)


def test_help_names_every_option_with_its_default_and_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for name, value in json.loads(json.dumps(asdict(TrainConfig()))).items():
        assert re.search(rf" {flag(name)}[ ,]", text)
        assert value is None or f"(default: {value})" in text or f"(default: {value!r})" in text
    for words in ("optimizer steps in all", "tokens (bytes of text) per sequence", "sequences per step"):
        assert words in text
