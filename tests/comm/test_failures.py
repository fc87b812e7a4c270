"""Ranks find out which of them has failed: by what it has left in the store, or since it does not answer."""

from __future__ import annotations

import atexit
import gc
import json
import socket
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import RankFailedError, RankMismatchError, fully_shard
from fsdp_compile.comm import failures
from fsdp_compile.comm.failures import continue_stopped_ranks
from fsdp_compile.comm.groups import RankStore
from tests.fake_world import fake_world
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import compile_eagerly

LOST = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"


def _told() -> str:
    """Rank 1 ends by an error, which rank 0 hears of while it waits, and when a collective fails."""
    place = RankStore.of("a test", (0, 1))
    if dist.get_rank() == 1:
        failures.tell(ValueError("a broken row"))
        failures.tell(ValueError("what followed"))
        return ""
    with pytest.raises(RankFailedError) as waiting:
        place.rendezvous("come").meet(0)
    with pytest.raises(RankFailedError) as failed:
        failures.refuse_lost_ranks(RuntimeError(LOST), "gathering a.weight")
    assert failed.value.what == waiting.value.what
    return str(failed.value)


def test_what_a_rank_has_told_is_said_by_those_that_wait() -> None:
    said, _ = run_ranks(_told, timeout_s=60)
    assert said.startswith("rank 1 failed: ValueError: a broken row\n  where: rank 0, gathering a.weight\n")


class _OfDynamoError(Exception):
    inner_exception = RankFailedError("rank 0 did not come")


def _told_by_a_compile() -> str:
    place = RankStore.of("a test", (0, 1))
    if dist.get_rank() == 1:
        failures.tell(_OfDynamoError())
        return ""
    with pytest.raises(RankFailedError) as waiting:
        place.rendezvous("come").meet(0)
    return waiting.value.what


def test_a_failure_that_a_compile_has_met_is_told_as_it_is() -> None:
    assert run_ranks(_told_by_a_compile, timeout_s=60)[0] == "rank 0 did not come"


def _does_not_answer() -> str:
    with mock.patch.object(failures, "_ANSWER_S", 0.3):
        if dist.get_rank() == 1:
            return ""
        with pytest.raises(RankFailedError) as caught:
            failures.refuse_lost_ranks(RuntimeError(LOST), "in a compiled forward of unit layers.0")
    return str(caught.value)


def test_a_rank_that_does_not_answer_is_named() -> None:
    said, _ = run_ranks(_does_not_answer, timeout_s=60)
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


def test_collectives_of_gloo_say_what_is_looked_for() -> None:
    """The texts are torch's: another version may have others."""
    (said, _) = run_ranks(_closed, timeout_s=20)
    assert failures._OF_COMMUNICATION.search(said)


def _closed() -> str:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1))
    return str(caught.value)


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
