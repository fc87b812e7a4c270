"""One process compiles a graph and the others load it; what stands in the way costs time alone, and is said."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config

from benchmarks._torch import compiled_graphs
from fsdp_compile._torch.inductor import cache_folder
from fsdp_compile.comm.failures import tell
from fsdp_compile.errors import RankFailedError
from fsdp_compile.lower import once
from fsdp_compile.lower.once import LEAST_BYTES, LOCKS, UnusableFolderError, check_folder, compile_once
from tests.models.kinds import Slim
from tests.ranks import run_ranks
from tests.two_sides import loss_of

_GRAPH = "a graph"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Inductor's files, which does not exist yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "disk" / "cache"))
    once._say.cache_clear()
    once._check_locks.cache_clear()
    return tmp_path / "disk" / "cache"


def _lock_file(folder: Path) -> Path:
    return folder / LOCKS / f"{hashlib.sha256(_GRAPH.encode()).hexdigest()}.lock"


_HOLD = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def _held_by_another_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    check_folder(folder)
    command = [sys.executable, "-c", _HOLD, str(_lock_file(folder))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def _in_thread(run: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_graph_is_lowered_by_one_at_a_time_and_others_wait_for_it(folder: Path) -> None:
    began, may_end = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        began.set()
        may_end.wait(30)
        order.append("first")

    owner = _in_thread(lambda: compile_once(_GRAPH, first))
    assert began.wait(30)
    waiter = _in_thread(lambda: compile_once(_GRAPH, lambda: order.append("second")))
    compile_once("another graph", lambda: order.append("another"))  # waits for nobody
    time.sleep(0.2)
    assert order == ["another"]
    may_end.set()
    owner.join(30)
    waiter.join(30)
    assert order == ["another", "first", "second"]


def test_those_that_waited_do_not_wait_for_each_other(folder: Path) -> None:
    both = threading.Barrier(2)
    with _held_by_another_process(folder) as process:
        waiters = [_in_thread(lambda: compile_once(_GRAPH, lambda: both.wait(30))) for _ in range(2)]
        time.sleep(0.3)
        process.kill()
        for waiter in waiters:
            waiter.join(30)
    assert not both.broken
    assert not any(waiter.is_alive() for waiter in waiters)


def test_the_lock_of_a_process_that_was_killed_is_free(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _held_by_another_process(folder) as process:
        process.kill()
        process.wait()
        assert compile_once(_GRAPH, lambda: "compiled") == "compiled"
    assert caplog.records == []


def test_a_compile_that_does_not_look_into_the_cache_waits_for_nobody(folder: Path) -> None:
    with _held_by_another_process(folder):
        assert compile_once(_GRAPH, lambda: "compiled", {"fx_graph_cache": False}) == "compiled"
        with config.patch(fx_graph_cache=False):
            assert compile_once(_GRAPH, lambda: "compiled") == "compiled"


def test_an_error_of_the_first_one_is_its_own(folder: Path) -> None:
    began = threading.Event()

    def fail() -> None:
        began.set()
        time.sleep(0.2)
        raise ValueError("of the first one")

    with ThreadPoolExecutor() as pool:
        owner = pool.submit(compile_once, _GRAPH, fail)
        assert began.wait(30)
        assert compile_once(_GRAPH, lambda: "compiled") == "compiled"
        with pytest.raises(ValueError, match="of the first one"):
            owner.result(30)


def test_nobody_waits_longer_than_the_users_timeout(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(once, "world_timeout", lambda: timedelta(seconds=0.6))
    with _held_by_another_process(folder):
        for _ in range(2):
            assert compile_once(_GRAPH, lambda: "compiled") == "compiled"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]  # once
    assert "has compiled the same one for 0.3 s and is not done" in caplog.text


def _told_while_waiting(folder: str) -> None:
    """Rank 1 tells that it fails, while rank 0 waits for a process that never ends."""
    if dist.get_rank() == 1:
        tell(ValueError("of rank 1"))
    else:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        with pytest.raises(RankFailedError, match="rank 1 failed: ValueError: of rank 1") as caught:
            compile_once(_GRAPH, lambda: "compiled")
        assert "waited for another process of its host to compile" in str(caught.value)


def test_what_a_rank_has_told_ends_the_wait_of_another(folder: Path) -> None:
    with _held_by_another_process(folder):
        run_ranks(_told_while_waiting, str(folder), timeout_s=60)


@contextlib.contextmanager
def _mounted(disk: Path, options: str) -> Iterator[None]:
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(disk)]
    made = subprocess.run(command, check=False, capture_output=True)
    if made.returncode != 0:
        pytest.skip("needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _compiles_elsewhere(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """The warning of a rank that compiles in a folder of its own, and then has the old one again."""
    used = [compile_once(_GRAPH, cache_folder) for _ in range(2)]
    assert used[0] == used[1] != folder
    assert used[0].stat().st_mode & 0o77 == 0
    assert cache_folder() == folder
    assert [record.levelno for record in caplog.records] == [logging.WARNING]  # once
    return caplog.text


@pytest.mark.optional
@pytest.mark.parametrize(
    ("options", "cause"), [("ro", "Read-only file system"), ("size=1m", "No space left on device, 1.0 MiB free")]
)
def test_a_folder_that_cannot_be_written(
    folder: Path, options: str, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    with _mounted(folder.parent, options):
        assert cause in _compiles_elsewhere(folder, caplog)


def test_a_disk_that_is_nearly_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = once.shutil.disk_usage("/")
    monkeypatch.setattr(once.shutil, "disk_usage", lambda _: usage._replace(free=LEAST_BYTES - 1))
    assert "No space left on device" in _compiles_elsewhere(folder, caplog)


@pytest.mark.parametrize(
    ("mode", "is_own_group", "is_used"),
    [(0o777, True, False), (0o702, True, False), (0o770, False, False), (0o770, True, True)],
)
def test_a_folder_in_which_others_may_write(
    folder: Path,
    mode: int,
    is_own_group: bool,  # noqa: FBT001
    is_used: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(once, "_is_own_group", lambda _number: is_own_group)
    folder.mkdir(parents=True)
    folder.chmod(mode)
    if is_used:
        check_folder(folder)
    else:
        assert "others may write" in _compiles_elsewhere(folder, caplog)


@pytest.mark.skipif(os.getuid() != 0, reason="an entry of root is everywhere")
def test_a_users_own_group_has_the_users_name() -> None:
    assert once._is_own_group(0)
    assert not once._is_own_group(54321)


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder away takes root")
def test_a_folder_of_another_user(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir(parents=True)
    os.chown(folder, 12345, -1)
    assert "belongs to another user" in _compiles_elsewhere(folder, caplog)


def test_a_file_system_without_locks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_args: object, **_kwargs: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(once.FileLock, "acquire", no_locks)
    with pytest.raises(UnusableFolderError, match="does not appear to support flock"):
        check_folder(folder)


def test_a_new_folder_is_the_users_alone(folder: Path) -> None:
    check_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list((folder / LOCKS).iterdir()) == []


def _compiled_and_loss(folder: str) -> tuple[int, float]:
    """How many graphs this rank has compiled with an Inductor folder, and the loss of its second step."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    before = compiled_graphs()
    model = Slim()
    compiled = torch.compile(model, backend="fsdp", options={"bucket_mb": 0})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = loss_of(compiled(torch.ones(4, 32) + dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return compiled_graphs() - before, loss.item()


@pytest.mark.long
@pytest.mark.inductor
def test_each_graph_is_compiled_once_on_a_host(tmp_path: Path) -> None:
    cold = run_ranks(_compiled_and_loss, str(tmp_path / "cache"))
    warm = run_ranks(_compiled_and_loss, str(tmp_path / "cache"))
    assert sum(compiled for compiled, _ in cold) == 2  # forward and backward
    assert [compiled for compiled, _ in warm] == [0, 0]
    assert [loss for _, loss in warm] == [loss for _, loss in cold]
