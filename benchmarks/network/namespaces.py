"""A real slow network on one machine: two network namespaces, joined by a link of limited rate.

Linux, root and iproute2 are needed: `ip netns`, a veth pair, and `tc` with a token bucket at either end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

RANKS = 2
PORT = 29_400


class UnavailableError(RuntimeError):
    """This machine cannot make the network; the message says why."""


@dataclasses.dataclass(frozen=True)
class Host:
    """One end of the link.

    Attributes:
        namespace: Its network namespace.
        interface: Its end of the veth pair.
        address: Its IP address.
    """

    namespace: str
    interface: str
    address: str


def check_available() -> None:
    """Looks for what is needed.

    Raises:
        UnavailableError: If something is missing; the message says what to do.
    """
    if sys.platform != "linux":
        raise UnavailableError(f"network namespaces are Linux's, and this is {sys.platform}")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise UnavailableError(f"{' and '.join(missing)} not found: install iproute2")
    if os.geteuid() != 0:
        raise UnavailableError("network namespaces need root: run this with sudo, or in a container with CAP_NET_ADMIN")


@contextlib.contextmanager
def slow_network(gbit_per_s: float) -> Iterator[tuple[Host, Host]]:
    """Makes two namespaces joined by a link of `gbit_per_s` in each direction, and removes them at the end.

    Raises:
        UnavailableError: If the machine lacks a tool, or refuses.
    """
    check_available()
    hosts = _hosts()
    try:
        for command in _set_up(hosts, gbit_per_s):
            _run(command)
        yield hosts
    finally:
        for host in hosts:  # the link goes with either namespace
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, check=False)


def run_ranks(hosts: Sequence[Host], module: str, arguments: Sequence[str], *, timeout_s: float) -> list[str]:
    """Runs `python -m module arguments` in each namespace as one rank of a gloo world.

    Returns:
        What each rank printed, in rank order.

    Raises:
        RuntimeError: If a rank fails, with the last lines of its errors, or does not end in time.
    """
    processes = [_start(host, rank, hosts[0], module, arguments) for rank, host in enumerate(hosts)]
    try:
        outcomes = [process.communicate(timeout=timeout_s) for process in processes]
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the ranks did not end within {timeout_s} s") from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, (process, (_, errors)) in enumerate(zip(processes, outcomes, strict=True)):
        if process.returncode:
            raise RuntimeError(f"rank {rank} failed with status {process.returncode}:\n{errors[-2000:]}")
    return [printed for printed, _ in outcomes]


def _hosts() -> tuple[Host, Host]:
    first, second = (
        Host(f"fsdp-{os.getpid()}-{n}", f"veth{os.getpid()}{n}", f"10.213.7.{n + 1}") for n in range(RANKS)
    )
    return first, second


def _set_up(hosts: tuple[Host, Host], gbit_per_s: float) -> Iterator[list[str]]:
    first, second = hosts
    for host in hosts:
        yield ["ip", "netns", "add", host.namespace]
    pair = ["peer", "name", second.interface, "netns", second.namespace]
    yield ["ip", "link", "add", first.interface, "netns", first.namespace, "type", "veth", *pair]
    # A burst of what the link sends within 2 ms, and a queue of 50 ms.
    burst_bytes = max(32_000, round(gbit_per_s * 1e9 / 8 * 2e-3))
    limit = ["rate", f"{round(gbit_per_s * 1e3)}mbit", "burst", str(burst_bytes), "latency", "50ms"]
    for host in hosts:
        inside = ["ip", "-n", host.namespace]
        yield [*inside, "address", "add", f"{host.address}/24", "dev", host.interface]
        yield [*inside, "link", "set", host.interface, "up"]
        yield [*inside, "link", "set", "lo", "up"]
        yield ["tc", "-n", host.namespace, "qdisc", "add", "dev", host.interface, "root", "tbf", *limit]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def _start(host: Host, rank: int, first: Host, module: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": first.address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": host.interface,
    }
    command = ["ip", "netns", "exec", host.namespace, sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
