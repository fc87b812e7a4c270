"""`fsdp-compile train` on two hosts of two ranks, which are network namespaces: a link that is cut, and mended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import pytest

from benchmarks.network.namespaces import PORT, Host, UnavailableError, slow_network
from tests.training.command import DRIVER, ROOT, TEXT, TIMEOUT_S, TINY, metrics

pytestmark = pytest.mark.long
_WAIT_S = 5
"""`--timeout`."""
_LAUNCHER_S = 90
"""Torch's launchers end that much later: they wait for each other's store, too."""


@contextmanager
def _hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with slow_network(1.0) as hosts:
            yield hosts
    except UnavailableError as error:
        pytest.skip(str(error))


def _inside(host: Host, *command: str) -> list[str]:
    return ["ip", "netns", "exec", host.namespace, *command]


@contextmanager
def _started(hosts: tuple[Host, Host], folder: Path, *arguments: str, **trouble: str) -> Iterator[list[Path]]:
    """The command of the README on each host; yields the files of what they print, and ends them."""
    (folder / "text").write_bytes(TEXT)
    first = hosts[0]
    processes, printed = [], []
    for host in hosts:
        where = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        where += ["--rdzv-endpoint", f"{first.address}:{PORT}", "--local-addr", host.address]
        command = [sys.executable, "-m", "torch.distributed.run", *where, DRIVER, "train", *arguments]
        own = {"GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        printed.append(folder / f"{host.interface}.txt")
        with printed[-1].open("w") as file:
            processes.append(
                subprocess.Popen(
                    _inside(host, *command),
                    cwd=folder,
                    env=os.environ | own | trouble,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    try:
        yield printed
        for process in processes:
            process.wait(timeout=TIMEOUT_S)
    finally:
        for process, path in zip(processes, printed, strict=True):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            print(path.name, process.returncode, path.read_text()[-4000:])


def _wait_for_step(run: Path, step: int) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        if (run / "metrics.jsonl").exists() and any(record["step"] >= step for record in metrics(run)):
            return
        time.sleep(0.1)
    raise AssertionError(f"no step {step}")


def _listening(host: Host) -> list[tuple[IPv4Address | IPv6Address, int]]:
    """Address and port of every socket that listens on a host."""
    found = []
    for table in ("tcp", "tcp6"):
        done = subprocess.run(_inside(host, "cat", f"/proc/net/{table}"), capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                raw, port = local.split(":")
                words = [bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8)]
                found.append((ip_address(b"".join(words)), int(port, 16)))
    return found


def _set_link(host: Host, state: str) -> None:
    subprocess.run(["ip", "-n", host.namespace, "link", "set", host.interface, state], check=True)


def test_a_cut_link_ends_both_hosts_and_a_mended_one_lets_them_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with _hosts() as hosts:
        with _started(hosts, tmp_path, *TINY, "--timeout", str(_WAIT_S), "--out", "run", SLOW_AT="3") as printed:
            _wait_for_step(run, 3)
            for number, host in enumerate(hosts):
                elsewhere = [(a, p) for a, p in _listening(host) if str(a) != host.address and not a.is_loopback]
                print(host, _listening(host))
                # Torch's stores, of its launcher and of the world, listen on all addresses of the first host.
                assert len(elsewhere) <= (2 if number == 0 else 0), elsewhere
            _set_link(hosts[1], "down")
            cut_s = time.monotonic()
            while not all("RankFailedError" in file.read_text() for file in printed):
                assert time.monotonic() - cut_s < _WAIT_S + _LAUNCHER_S, [file.read_text()[-3000:] for file in printed]
                time.sleep(0.2)
            print(f"both named after {time.monotonic() - cut_s:.1f} s")
        print(f"both ended after {time.monotonic() - cut_s:.1f} s")
        assert (run / "checkpoints" / "step-000002").is_dir()
        _set_link(hosts[1], "up")
        with _started(hosts, tmp_path, "--resume", "run", "--timeout", "60") as printed:
            pass
        assert "resumed after step" in printed[0].read_text()
    assert [record["step"] for record in metrics(run)] == list(range(7))
