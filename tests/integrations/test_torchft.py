"""A replica group that torchft manages is lost and comes back; the other one goes on, to the numbers of one process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.integrations.programs.with_torchft"
TOGETHER, DIES_AFTER = 6, 3

pytestmark = [pytest.mark.optional, pytest.mark.long]


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """The address of torchft's coordinator."""
    coordination = pytest.importorskip("torchft.coordination")
    server = coordination.LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=5000)
    yield server.address()
    server.shutdown()


def _start(group: int, folder: Path, lighthouse: str, *options: str) -> subprocess.Popen[str]:
    launcher = ["torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node", "2", *options]
    arguments = [str(group), str(TOGETHER), str(DIES_AFTER), str(folder)]
    environment = {
        "TORCHFT_LIGHTHOUSE": lighthouse,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a restart has a store of its own
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
    }
    with (folder / f"output-{group}").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *launcher, "-m", PROGRAM, *arguments],
            cwd=folder, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


def _replayed(steps: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The parameters that one process has after the same steps, on the rows of the groups that took part."""
    program = pytest.importorskip(PROGRAM)
    model = program.make_model()
    optimizer = program.make_optimizer(model)
    for made in steps:
        groups = range(int(made["groups"]))  # without group 1, or with it
        rows = torch.cat([program.batch(made["step"], g, r) for g in groups for r in range(program.RANKS)])
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.timeout(400)
def test_a_lost_replica_group_does_not_stop_the_other_one(lighthouse: str, tmp_path: Path) -> None:
    groups = [_start(0, tmp_path, lighthouse), _start(1, tmp_path, lighthouse, "--max-restarts", "1")]
    try:
        statuses = [each.wait(300) for each in groups]
    finally:
        for each in groups:
            each.terminate()
            each.wait()
        outputs = [(tmp_path / f"output-{group}").read_text()[-6000:] for group in range(2)]
    assert statuses == [0, 0], outputs
    steps = json.loads((tmp_path / "steps-0.json").read_text())
    assert [made["step"] for made in steps] == list(range(len(steps))), "each step is made once"
    took_part = [(groups, len(list(made))) for groups, made in itertools.groupby(made["groups"] for made in steps)]
    assert [groups for groups, _ in took_part] == [1, 2, 1, 2]
    assert [count for _, count in took_part[1::2]] == [DIES_AFTER, TOGETHER - DIES_AFTER]
    trained = [torch.load(tmp_path / f"trained-{group}.pt", weights_only=True) for group in range(2)]
    for name, expected in _replayed(steps).items():
        assert torch.equal(trained[0][name], trained[1][name])
        torch.testing.assert_close(trained[0][name], expected, rtol=1e-5, atol=1e-6)
