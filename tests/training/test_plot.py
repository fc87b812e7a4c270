"""The loss curve."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fsdp_compile.training.metrics import Record, plot_losses

RECORDS = [
    Record(step=0, held_out_loss=5.5, time_s=0),
    Record(step=1, loss=5.4, time_s=1),
    Record(step=2, loss=5.0, held_out_loss=4.9, time_s=2),
]


@pytest.mark.optional
def test_writes_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot_losses(RECORDS, tmp_path / "loss.png")
    content = (tmp_path / "loss.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content[-8:-4] == b"IEND"


def test_without_matplotlib_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "fsdp_compile.training.metrics.find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    assert not plot_losses(RECORDS, tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()
