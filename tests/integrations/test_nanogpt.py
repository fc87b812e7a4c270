"""nanoGPT's training script: by DDP as it is, and sharded with the lines of `docs/frameworks.md`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integrations.programs.like_nanogpt import train
from tests.ranks import run_ranks


@pytest.mark.long
def test_losses_and_checkpoints_are_those_of_ddp(tmp_path: Path) -> None:
    expected = run_ranks(train, "ddp", str(tmp_path))
    found = run_ranks(train, "fsdp", str(tmp_path))
    assert len(expected[0]) == 10
    assert found[0] == pytest.approx(expected[0], rel=2e-5)
    # What the first rank alone saves is whole, and the same.
    theirs = torch.load(tmp_path / "ddp.pt", weights_only=True)
    mine = torch.load(tmp_path / "fsdp.pt", weights_only=True)
    assert list(mine["model"]) == list(theirs["model"])
    for name, value in theirs["model"].items():
        torch.testing.assert_close(mine["model"][name], value, rtol=2e-5, atol=2e-5)
    moments = [state["exp_avg"].norm().item() for state in theirs["optimizer"]["state"].values()]
    own = [state["exp_avg"].norm().item() for state in mine["optimizer"]["state"].values()]
    assert sorted(own) == pytest.approx(sorted(moments), rel=1e-4)
    resumed = run_ranks(train, "fsdp", str(tmp_path), resume=True)
    assert resumed[0] == pytest.approx(run_ranks(train, "ddp", str(tmp_path), resume=True)[0], rel=2e-5)
