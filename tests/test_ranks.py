"""The pool of ranks itself: order, errors, deaths, hangs, and what one call leaves to the next."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_compile.errors import ConfigError
from tests import long
from tests.ranks import RankError, close_pool, run_ranks

FakeWorld = Callable[..., AbstractContextManager[dist.ProcessGroup]]


def _rank_and_world_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def _sum_of_ranks(scale: float, *, offset: float) -> float:
    total = torch.tensor(dist.get_rank() * scale + offset)
    dist.all_reduce(total)
    return total.item()


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ConfigError("no such option", where="options", instead="another")
    dist.barrier()


class _UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__("cannot travel", lambda: None)


def _raise_unpicklable() -> None:
    raise _UnpicklableError


def _return_unpicklable() -> object:
    return lambda: None


def _exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def _kill_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def _dirty() -> None:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(mode=True)
    torch.set_grad_enabled(mode=False)
    torch.set_num_threads(2)
    os.environ["LEFT_BEHIND"] = "1"
    dist.new_group([0])


def _state() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        os.environ.get("LEFT_BEHIND"),
        torch.rand(1).item(),
    )


def _pid() -> int:
    return os.getpid()


@long.parametrize("world_size", [2, 1, 4, 3], always=[2, 4])
def test_results_come_in_rank_order_from_a_world_of_the_size_asked_for(world_size: int) -> None:
    expected = [(rank, world_size) for rank in range(world_size)]
    assert run_ranks(_rank_and_world_size, world_size=world_size) == expected


def test_ranks_reduce_together_and_take_arguments() -> None:
    assert run_ranks(_sum_of_ranks, 10.0, world_size=3, offset=1.0) == [33.0] * 3


def test_processes_are_reused() -> None:
    first = run_ranks(_pid)
    assert run_ranks(_pid) == first
    assert os.getpid() not in first


@long.parametrize("rank", [0, 1], always=[1])
def test_an_exception_keeps_its_type_and_brings_its_traceback(rank: int) -> None:
    with pytest.raises(ConfigError, match="no such option") as caught:
        run_ranks(_raise_on, rank)
    assert f"Raised on rank {rank} of 2" in caught.value.__notes__[0]
    assert "in _raise_on" in caught.value.__notes__[0]
    assert caught.value.instead == "another"
    assert run_ranks(_sum_of_ranks, 1.0, offset=0.0) == [1.0, 1.0]


def test_what_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(RankError, match="_UnpicklableError"):
        run_ranks(_raise_unpicklable)
    with pytest.raises(RankError, match="the result cannot be sent back"):
        run_ranks(_return_unpicklable)
    with pytest.raises((pickle.PicklingError, AttributeError), match=r"pickle|local object"):
        run_ranks(lambda: None)


@pytest.mark.parametrize("world_size", [0, 5])
def test_a_world_that_the_pool_cannot_run_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size is {world_size}"):
        run_ranks(_pid, world_size=world_size)


@long.parametrize(
    ("die", "rank", "says"), [(_exit_on, 1, "exit code 7"), (_kill_on, 0, "SIGKILL")], always=[(_kill_on, 0, "SIGKILL")]
)
def test_a_dying_rank_is_named_and_the_next_call_works(die: Callable[[int], None], rank: int, says: str) -> None:
    with pytest.raises(RankError, match=f"rank {rank} of 2 died: {says}"):
        run_ranks(die, rank)
    assert run_ranks(_sum_of_ranks, 1.0, offset=0.0) == [1.0, 1.0]


def test_a_hanging_rank_is_named_with_its_stack_and_the_next_call_works() -> None:
    before = run_ranks(_pid)
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 did not end within 1 s.*in _sleep_on"):
        run_ranks(_sleep_on, 1, timeout_s=1)
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert run_ranks(_rank_and_world_size) == [(0, 2), (1, 2)]


def test_a_call_finds_nothing_of_the_one_before() -> None:
    clean = run_ranks(_state)
    run_ranks(_dirty)
    assert run_ranks(_state) == clean
    assert clean[0][:5] == (torch.float32, False, True, 1, None)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_no_rank_outlives_a_killed_session(tmp_path: Path) -> None:
    script = tmp_path / "session.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal
            from tests.ranks import run_ranks
            from tests.test_ranks import _pid
            if __name__ == "__main__":
                print(*run_ranks(_pid), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)}
    session = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert session.returncode == -signal.SIGKILL, session.stderr
    pids = [int(pid) for pid in session.stdout.split()]
    assert len(pids) == 2
    assert _all_end_soon(pids)


@pytest.mark.long
def test_a_closed_pool_starts_again() -> None:
    before = run_ranks(_pid, world_size=1)
    close_pool()
    assert run_ranks(_pid, world_size=1) != before


def test_a_fake_world_has_the_size_asked_for_and_ends(fake_world: FakeWorld) -> None:
    with fake_world(64, rank=3) as group:
        assert (dist.get_rank(), dist.get_world_size()) == (3, 64)
        assert group.size() == 64
    assert not dist.is_initialized()


def _all_end_soon(pids: list[int]) -> bool:
    for _ in range(100):
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie has ended; its new parent has not looked yet
