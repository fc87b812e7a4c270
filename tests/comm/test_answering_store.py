"""A store that does not answer, as that of a host which is cut off, ends a wait in time."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from fsdp_compile.comm import failures
from fsdp_compile.comm.failures import AnsweringStore, pauses
from fsdp_compile.errors import RankFailedError
from tests.fake_world import fake_world


class _CutOff(dist.Store):
    """Its operations wait until the test ends."""

    def __init__(self, mended: threading.Event) -> None:
        super().__init__()
        self.mended = mended

    def check(self, keys: list[str]) -> bool:  # noqa: ARG002
        self.mended.wait()
        return False

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
    keys = [str(number) for number in range(1000)]
    gone = ["0", "500", "999"]
    for key in keys:
        if key not in gone:
            store.set(key, "")
    asked: list[int] = []

    def check(keys: list[str]) -> bool:
        asked.append(len(keys))
        return AnsweringStore.check(store, keys)

    monkeypatch.setattr(store, "check", check)
    assert store.missing(keys) == gone
    assert len(asked) <= 3 * 2 * 10 + 1  # 2**10 is 1000: each is found in ten halvings
    asked.clear()
    assert store.missing(keys[1:400]) == []
    assert asked == [399]


def test_many_ranks_look_more_seldom() -> None:
    first, *_, longest = itertools.islice(pauses(8), 20)
    assert (first, longest) == (1e-3, 0.1)
    assert list(itertools.islice(pauses(1000), 20))[-1] == 0.5


def test_no_answer_is_an_error(cut_off: _CutOff) -> None:
    with pytest.raises(RuntimeError, match=r"no answer within 0\.05 s"):
        AnsweringStore(cut_off, 0.05).check(["key"])


def test_a_rank_that_is_cut_off_from_the_store_says_so_and_ends(
    cut_off: _CutOff, monkeypatch: pytest.MonkeyPatch
) -> None:
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
