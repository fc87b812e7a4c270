"""`fsdp-compile train` from start to end, in processes of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from fsdp_compile.cli.main import main
from tests.training.command import DRIVER, TINY, finish, metrics, session_of, start, wait_for_line
from tests.training.small_run import names

KEYS = {"step", "loss", "held_out_loss", "grad_norm", "lr", "tokens_per_s", "memory_bytes", "time_s", "skipped_steps"}
TROUBLE = "RuntimeError: trouble on demand"
LAST_LINE = re.compile(r"held-out loss (\d\.\d+) -> (\d\.\d+) nats per byte \(.* bits\) after 6 steps, \d+ s")


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, str, Path]:
    """Status, output, errors and folder of a run that joined a torchrun, and that nobody interrupted."""
    folder = tmp_path_factory.mktemp("joined")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"]
    return *finish(start(folder, *torchrun, DRIVER, "train", *TINY, "--out", "run")), folder / "run"


def _check_run(run: Path, out: str) -> None:
    lines = out.splitlines()
    before, after = map(float, LAST_LINE.fullmatch(lines[-1]).groups())  # type: ignore[union-attr]
    assert after < before
    records = metrics(run)
    assert [record["step"] for record in records] == list(range(7))
    assert all(set(record) == KEYS for record in records)
    assert before == pytest.approx(records[0]["held_out_loss"], abs=6e-4)
    assert after == pytest.approx(records[-1]["held_out_loss"], abs=6e-4)
    assert (run / "metrics.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert names(run / "checkpoints") == ["step-000004", "step-000006"]


def _check_equal(run: Path, uninterrupted: Path) -> None:
    for mine, theirs in zip(metrics(run), metrics(uninterrupted), strict=True):
        for name in ("step", "loss", "held_out_loss", "grad_norm", "lr"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-6), (mine["step"], name)


@pytest.mark.long
@pytest.mark.inductor
def test_one_command_trains(tmp_path: Path) -> None:
    command = ["-m", "fsdp_compile.cli", "train", *TINY, "--ranks", "2", "--out", "run"]
    status, out, err = finish(start(tmp_path, *command))
    assert status == 0, err
    assert err == ""
    _check_run(tmp_path / "run", out)


@pytest.mark.long
def test_an_existing_torchrun_is_joined(joined: tuple[int, str, str, Path]) -> None:
    status, out, err, run = joined
    assert status == 0, err
    assert out.startswith("2 ranks on cpu, run folder run\n")
    _check_run(run, out)


def _interrupt(process: subprocess.Popen[str], target: str) -> None:
    if target == "group":  # as a terminal does
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)


@pytest.mark.long
@pytest.mark.parametrize("target", ["group", "parent"])
def test_an_interrupted_run_leaves_nothing_but_a_checkpoint_to_go_on_from(
    target: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = tmp_path / "run"
    process = start(tmp_path, DRIVER, "train", *TINY, "--ranks", "2", "--out", "run", PAUSE_AT="4")
    wait_for_line(process, "paused")
    assert len(session_of(process, within_s=0)) >= 3
    _interrupt(process, target)
    status, _, err = finish(process)
    assert status == 128 + signal.SIGINT
    assert session_of(process) == []
    assert err.strip() == "interrupted; go on with: fsdp-compile train --resume run"
    assert [record["step"] for record in metrics(run)] == [0, 1, 2, 3]
    assert names(run / "checkpoints") == ["step-000002"]
    if target == "parent":
        return  # once is enough

    status, out, err = finish(start(tmp_path, DRIVER, "train", "--resume", "run", "--ranks", "2"))
    assert status == 0, err
    assert "resumed after step 2\n" in out
    _check_run(run, out)
    *_, uninterrupted = request.getfixturevalue("joined")
    _check_equal(run, uninterrupted)


FULL = "run/checkpoints/.partial/__1_0.distcp: No space left on device"
FAULTS = {
    "FAIL_AT": "rank 1 failed, the other ranks were ended:\nTraceback (most recent call last):\n",
    "KILL_AT": "rank 1 was ended by SIGKILL",
    "STOP_AT": "rank 1 does not answer",
    "FULL_AT": f"CheckpointError: rank 1 cannot write {FULL}\n  where: step 4\n",
}
"""Of the driver, and what is said then."""


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_is_blamed_and_ends_the_others(fault: str, tmp_path: Path) -> None:
    timeout = ["--timeout", "5"]
    process = start(tmp_path, DRIVER, "train", *TINY, *timeout, "--ranks", "2", "--out", "run", **{fault: "3"})
    status, _, err = finish(process)
    assert status == 1
    assert session_of(process) == []
    # Not in the first line: torch may warn of collectives that the other rank was waiting for.
    assert FAULTS[fault] in err
    assert "rank 0 failed" not in err
    assert err.rstrip().endswith(TROUBLE) == (fault == "FAIL_AT")
    assert names(tmp_path / "run" / "checkpoints") == ["step-000002"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "step", "said"),
    [
        ("KILL_AT", 4, "restarted, 1 of 1\n"),
        ("FAIL_AT", 1, f"restarted, 1 of 1 after rank 1 failed: {TROUBLE}\n"),
    ],
)
def test_a_restarted_run_goes_on_from_its_last_checkpoint(
    fault: str, step: int, said: str, tmp_path: Path, joined: tuple[int, str, str, Path]
) -> None:
    options = ["--ranks", "2", "--timeout", "60", "--out", "run", "--max-restarts", "1"]
    status, out, err = finish(start(tmp_path, DRIVER, "train", *TINY, *options, **{fault: str(step)}))
    assert status == 0, err
    assert said in out
    assert ("resumed after step 2\n" in out) == (step > 2)
    _check_run(tmp_path / "run", out)
    _check_equal(tmp_path / "run", joined[-1])


@pytest.mark.long
def test_restarts_are_counted_and_the_last_failure_is_named(tmp_path: Path) -> None:
    options = ["--ranks", "2", "--out", "run", "--max-restarts", "1"]
    status, out, err = finish(start(tmp_path, DRIVER, "train", *TINY, *options, FAIL_AT="3", TROUBLES="2"))
    assert status == 1
    assert out.count("restarted, 1 of 1") == 1
    assert err.rstrip().endswith(TROUBLE)
    assert names(tmp_path / "run" / "checkpoints") == ["step-000002"]


@pytest.mark.long
def test_a_torchrun_that_restarts_goes_on_in_the_folder(tmp_path: Path, joined: tuple[int, str, str, Path]) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "1", DRIVER, "train", *TINY, "--out", "run"]
    status, out, err = finish(start(tmp_path, *command, FAIL_AT="4"))
    assert status == 0, err
    assert "resumed after step 2\n" in out
    _check_equal(tmp_path / "run", joined[-1])


REFUSED = [
    *(("--timeout", given, {}) for given in ("0", "1e-300", "1e300", "nan", "inf")),
    ("--max-restarts", "-1", {}),
    ("--max-restarts", "1", {"RANK": "0", "WORLD_SIZE": "1"}),
]


@pytest.mark.parametrize(("option", "given", "environment"), REFUSED)
def test_options_that_make_no_sense_are_refused(
    option: str,
    given: str,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", option, given]) == 2
    assert option in capsys.readouterr().err
