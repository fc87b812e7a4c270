"""`fsdp-compile bench`: finds benchmarks in a checkout, and says so elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_compile.cli.main import main

CHECKOUT = Path(__file__).parent.parent.parent


def test_outside_a_checkout_it_says_where_benchmarks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench"]) == 2
    assert "root of a checkout" in capsys.readouterr().err


def test_an_unknown_benchmark_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(CHECKOUT)
    assert main(["bench", "steptime"]) == 2
    assert "no benchmark steptime" in capsys.readouterr().err


@pytest.mark.long
def test_a_benchmark_gets_its_arguments(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(CHECKOUT)
    assert main(["bench", "overhead", "--help"]) == 0
    assert "python -m benchmarks.overhead" in capfd.readouterr().out
