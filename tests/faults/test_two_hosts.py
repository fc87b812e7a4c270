"""Two hosts (network namespaces) of two ranks each: the link is cut and mended, and the run resumed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.network.namespaces import Host, UnavailableError, slow_network
from fsdp_compile.training.metrics import read_records

STEPS = 400
TIMEOUT_S = 10.0
ENDS_WITHIN_S = 60.0
"""After the cut: the timeout, the 3 s in which ranks and the store may answer, and a busy machine."""
COMPILES_WITHIN_S = 400.0
"""Four ranks that start, compile and train on a busy machine."""
TRAIN = (
    *("--steps", str(STEPS), "--checkpoint-every", "20", "--eval-every", "400", "--log-every", "1"),
    *("--width", "16", "--layers", "1", "--heads", "2", "--seq-len", "16", "--batch-size", "4"),
)


@contextlib.contextmanager
def _hosts() -> Iterator[tuple[Host, Host]]:
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(slow_network(10.0))
        except UnavailableError as reason:
            pytest.skip(str(reason))
        yield hosts


def _start(host: Host, first: Host, output: Path, *options: str) -> subprocess.Popen[bytes]:
    launcher = ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", f"{first.address}:29400", "--local-addr", host.address]
    # Namespaces share one hostname, by which torchrun would find out whose address that is.
    launcher += ["--rdzv-conf", f"is_host={int(host is first)}"]
    command = [*launcher, "--no-python", "fsdp-compile", "train", "--timeout", str(TIMEOUT_S), *options]
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": host.interface,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with output.open("wb") as file:
        return subprocess.Popen(
            ["ip", "netns", "exec", host.namespace, *command],
            env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def _run(hosts: Sequence[Host], folder: Path, *options: str) -> list[subprocess.Popen[bytes]]:
    return [_start(host, hosts[0], folder / f"output-{place}", *options) for place, host in enumerate(hosts)]


def _set_link(hosts: Sequence[Host], state: str) -> None:
    for host in hosts:
        subprocess.run(["ip", "-n", host.namespace, "link", "set", host.interface, state], check=True)


def _end(launchers: Sequence[subprocess.Popen[bytes]]) -> None:
    for launcher in launchers:
        launcher.terminate()  # which also ends its ranks
    for launcher in launchers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(40)
        launcher.kill()
        launcher.wait()


def _wait(
    launchers: Sequence[subprocess.Popen[bytes]], folder: Path, what: Callable[[], bool], within_s: float
) -> None:
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s, _outputs(folder)
        assert any(launcher.poll() is None for launcher in launchers) or what(), _outputs(folder)
        time.sleep(0.1)


def _outputs(folder: Path) -> list[str]:
    return [(folder / f"output-{place}").read_text()[-20_000:] for place in range(2)]


def _have_said_why(output: str) -> bool:
    return "does not answer" in output


@pytest.mark.optional
@pytest.mark.long
@pytest.mark.timeout(1000)
def test_a_cut_link_ends_both_hosts_and_the_run_goes_on_when_it_is_mended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with _hosts() as hosts:
        launchers = _run(hosts, tmp_path, *TRAIN, "--out", str(run))
        try:
            _wait(launchers, tmp_path, lambda: any(run.glob("checkpoints/step-*/complete.json")), COMPILES_WITHIN_S)
            _set_link(hosts, "down")
            # Torch's launcher of the host that lacks the store waits until TCP gives up; its ranks do not.
            _wait(launchers, tmp_path, lambda: all(map(_have_said_why, _outputs(tmp_path))), ENDS_WITHIN_S)
            assert launchers[0].wait(ENDS_WITHIN_S) != 0
        finally:
            _end(launchers)
        _set_link(hosts, "up")
        launchers = _run(hosts, tmp_path, "--resume", str(run))
        try:
            statuses = [launcher.wait(COMPILES_WITHIN_S) for launcher in launchers]
        finally:
            _end(launchers)
        assert statuses == [0, 0], _outputs(tmp_path)
    records = read_records(run / "metrics.jsonl")
    assert [record.step for record in records] == list(range(STEPS + 1))
    assert "resumed after step" in _outputs(tmp_path)[0] + _outputs(tmp_path)[1]
