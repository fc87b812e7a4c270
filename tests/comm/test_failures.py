"""Ranks find out which of them has failed: by what it has left in the store, or since it does not answer."""

from __future__ import annotations

import atexit
import gc
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import RankFailedError, RankMismatchError, fully_shard
from fsdp_compile.comm import failures
from fsdp_compile.comm.failures import AnsweringStore, continue_stopped_ranks, pauses
from fsdp_compile.comm.groups import RankStore
from tests.fake_world import fake_world
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import compile_eagerly

LOST = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"


class _OfDynamoError(Exception):
    inner_exception = RankFailedError("rank 0 did not come")


def _told(*errors: Exception) -> tuple[str, str]:
    """Rank 1 ends by an error, which rank 0 hears of while it waits, and when a collective fails."""
    place = RankStore.of("a test", (0, 1))
    if dist.get_rank() == 1:
        for error in errors:
            failures.tell(error)
        return "", ""
    with pytest.raises(RankFailedError) as waiting:
        place.rendezvous("come").meet(0)
    with pytest.raises(RankFailedError) as failed:
        failures.refuse_lost_ranks(RuntimeError(LOST), "gathering a.weight")
    assert failed.value.what == waiting.value.what
    return failed.value.what, failed.value.where or ""


@pytest.mark.parametrize(
    ("errors", "what"),
    [
        ((ValueError("a broken row"), ValueError("what followed")), "rank 1 failed: ValueError: a broken row"),
        ((_OfDynamoError(),), "rank 0 did not come"),  # a failure that a compile has met
    ],
)
def test_what_a_rank_has_told_is_said_by_those_that_wait(errors: tuple[Exception, ...], what: str) -> None:
    assert run_ranks(_told, *errors, timeout_s=60)[0] == (what, "rank 0, gathering a.weight")


@on_ranks(timeout_s=60)
def test_a_rank_that_does_not_answer_is_named() -> None:
    if dist.get_rank() == 0:
        with mock.patch.object(failures, "_ANSWER_S", 0.3), pytest.raises(RankFailedError) as caught:
            failures.refuse_lost_ranks(RuntimeError(LOST), "in a compiled forward of unit layers.0")
        said = str(caught.value)
        assert said.startswith("rank 1 does not answer")
        assert "Connection closed by peer" in said
        assert "where: rank 0, in a compiled forward of unit layers.0" in said


@on_ranks(timeout_s=60)
def test_no_rank_is_blamed_where_all_answer_but_what_each_does_is_said() -> None:
    with pytest.raises(RankFailedError) as caught:
        failures.refuse_lost_ranks(RuntimeError(LOST), f"in the forward of unit layers.{dist.get_rank()}")
    said = str(caught.value)
    assert "\nrank 0: in the forward of unit layers.0\nrank 1: in the forward of unit layers.1\n" in said
    assert said.startswith("a collective failed, and all ranks still answer: ")
    assert "not inside of `if rank == 0:`" in said


@on_ranks(timeout_s=60)
def test_other_errors_are_left_alone() -> None:
    failures.refuse_lost_ranks(RuntimeError("The size of tensor a must match"), "anywhere")
    failures.refuse_lost_ranks(RankMismatchError("Connection closed"), "anywhere")
    failures.tell(RuntimeError(LOST))  # which is another rank's failure
    assert failures.failed_elsewhere(dist.distributed_c10d._get_default_store(), "") is None


def test_an_error_that_nothing_catches_is_printed_as_before() -> None:
    with (
        mock.patch.object(sys, "excepthook") as before,
        mock.patch.object(gc, "freeze") as freeze,
        mock.patch.object(atexit, "register") as at_exit,
    ):
        failures.tell_of_uncaught_errors.__wrapped__()
        error = ValueError("no world was started")
        sys.excepthook(ValueError, error, None)
        before.assert_called_once_with(ValueError, error, None)
        freeze.assert_called_once_with()  # the process then ends quickly
        at_exit.assert_called_once_with(continue_stopped_ranks)


def test_an_error_that_nothing_catches_is_left_for_the_lines_of_torchs_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(failures, "end_by", lambda _error: None)
    with mock.patch.object(sys, "excepthook"):
        failures.tell_of_uncaught_errors.__wrapped__()
        sys.excepthook(ValueError, ValueError("no world was started"), None)
        assert not file.exists()
        with fake_world(2):
            sys.excepthook(ValueError, ValueError("a broken row"), None)
            sys.excepthook(ValueError, ValueError("what followed"), None)
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "ValueError: a broken row"
    assert message["extraInfo"]["py_callstack"].rstrip().endswith("ValueError: a broken row")


@on_ranks(timeout_s=20)
def test_collectives_of_gloo_say_what_is_looked_for() -> None:
    """The texts are torch's: another version may have others."""
    if dist.get_rank() == 1:
        dist.destroy_process_group()
    else:
        with pytest.raises(RuntimeError, match=failures._OF_COMMUNICATION):
            dist.all_reduce(torch.ones(1))


def _destroyed_first(port: int) -> str:
    """As in `try: ... finally: dist.destroy_process_group()`, whose error comes up after that."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=2)
    compile_eagerly(fully_shard(nn.Linear(4, 4)))(torch.ones(1, 4))
    model = fully_shard(nn.Linear(4, 4))
    if rank == 1:
        dist.destroy_process_group()
        failures.tell(ValueError("a broken row"))
        return ""
    with pytest.raises(RankFailedError) as waiting:
        compile_eagerly(model)(torch.ones(1, 4))
    return waiting.value.what


def test_a_rank_that_has_destroyed_its_world_tells_all_the_same() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    assert run_ranks(_destroyed_first, port, timeout_s=200)[0] == "rank 1 failed: ValueError: a broken row"


# A store that does not answer, as that of a host which is cut off.


class _CutOff(dist.Store):
    """Its operations wait until the test ends."""

    def __init__(self, mended: threading.Event) -> None:
        super().__init__()
        self.mended = mended

    def check(self, keys: list[str]) -> bool:  # noqa: ARG002
        return self.mended.wait()

    def set(self, key: str, value: str) -> None:  # noqa: ARG002
        self.mended.wait()


@pytest.fixture
def cut_off() -> Iterator[_CutOff]:
    mended = threading.Event()
    yield _CutOff(mended)
    mended.set()


def test_answers_and_errors_are_those_of_the_store() -> None:
    store = AnsweringStore(dist.HashStore(), 10.0)
    store.set("key", "value")
    assert store.check(["key"])
    assert not store.check(["key", "other"])
    assert store.get("key") == b"value"
    assert (store.add("number", 2), store.add("number", 3)) == (2, 5)
    assert store.delete_key("key")
    assert not store.check(["key"])
    with pytest.raises(RuntimeError, match="Not a directory"):
        AnsweringStore(dist.FileStore("/dev/null/nowhere", 1), 10.0).check(["key"])


def test_few_of_many_that_are_missing_are_found_with_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    store = AnsweringStore(dist.HashStore(), 10.0)
    keys, gone = [str(number) for number in range(1000)], ["0", "500", "999"]
    for key in keys:
        if key not in gone:
            store.set(key, "")
    with mock.patch.object(store, "check", wraps=store.check) as check:
        assert store.missing(keys) == gone
        assert check.call_count <= 3 * 2 * 10 + 1  # 2**10 is 1000: each is found in ten halvings
        check.reset_mock()
        assert store.missing(keys[1:400]) == []
        assert check.call_count == 1


def test_many_ranks_look_more_seldom() -> None:
    first, *_, longest = itertools.islice(pauses(8), 20)
    assert (first, longest) == (1e-3, 0.1)
    assert list(itertools.islice(pauses(1000), 20))[-1] == 0.5


def test_a_rank_that_is_cut_off_from_the_store_says_so_and_ends(
    cut_off: _CutOff, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match=r"no answer within 0\.05 s"):
        AnsweringStore(cut_off, 0.05).check(["key"])
    monkeypatch.setattr(failures, "default_store", lambda: cut_off)
    monkeypatch.setattr(failures, "_ANSWER_S", 0.1)
    monkeypatch.setattr(failures, "_TELL_S", 0.1)
    start_s = time.monotonic()
    with fake_world(2):
        with pytest.raises(RankFailedError, match="store through which ranks meet does not answer") as caught:
            failures.refuse_lost_ranks(RuntimeError("gloo/transport: Timed out waiting"), "in a test")
        failures.tell(caught.value)
        failures.refuse_failed_elsewhere("which waits")
    assert time.monotonic() - start_s < 30


# Stopped ranks.

_OF_A_SHELL = "sleep 600 & kill -STOP $!; echo $!; wait"


def _state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def _wait_for(process: int, states: str) -> None:
    end_s = time.monotonic() + 10
    while _state(process) not in states:
        assert time.monotonic() < end_s, f"{process} is {_state(process)}, not {states}"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_stopped_processes_of_the_launcher_go_on_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)  # this process is the launcher
    with (
        subprocess.Popen(["sleep", "600"]) as rank,
        subprocess.Popen(["sh", "-c", _OF_A_SHELL], stdout=subprocess.PIPE, text=True) as shell,
    ):
        assert shell.stdout is not None
        other = int(shell.stdout.readline())
        try:
            rank.send_signal(signal.SIGSTOP)
            _wait_for(rank.pid, "T")
            _wait_for(other, "T")
            monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
            continue_stopped_ranks()
            assert _state(rank.pid) == "T", "there is no launcher"
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "this run")
            continue_stopped_ranks()
            _wait_for(rank.pid, "RS")
            assert _state(other) == "T", "of another parent"
        finally:
            rank.kill()
            os.kill(other, signal.SIGKILL)
