"""Ranks that compare a text through a store: threads here, so that a rank may die, and a store fail, in no time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch.distributed as dist

from fsdp_compile import RankFailedError, RankMismatchError
from fsdp_compile.comm import rendezvous
from fsdp_compile.comm.failures import AnsweringStore
from fsdp_compile.comm.rendezvous import Rendezvous, digest_of

T = TypeVar("T")
TIMEOUT_S = 60.0


def _rooms(store: dist.Store, ranks: tuple[int, ...], *, timeout_s: float = TIMEOUT_S) -> list[Rendezvous]:
    prefix = "-".join(map(str, ranks))
    return [Rendezvous(_answering(store, prefix), prefix, ranks, number, timeout_s) for number in range(len(ranks))]


def _answering(store: dist.Store, prefix: str) -> AnsweringStore:
    return AnsweringStore(dist.PrefixStore(prefix, store), TIMEOUT_S)


def _at_once(*calls: Callable[[], T]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def _comparing(room: Rendezvous, text: str, number: int = 1) -> Callable[[], str | None]:
    def run() -> str | None:
        found = room.first(number, digest_of(text), text)
        room.meet(number)
        return found

    return run


def test_ranks_that_agree_go_on_and_leave_nothing_in_the_store() -> None:
    store = dist.HashStore()
    rooms = _rooms(store, (4, 5, 6))
    before = store.num_keys()
    for number in (1, 2):
        assert _at_once(*(_comparing(room, "same", number) for room in rooms)) == [None] * 3
    assert store.num_keys() == before


def test_a_rank_with_another_text_gets_that_of_the_first_one() -> None:
    rooms = _rooms(dist.HashStore(), (4, 5, 6))
    found = _at_once(*(_comparing(room, text) for room, text in zip(rooms, ("one", "one", "two"), strict=True)))
    assert found == [None, None, "one"]


def _failure(room: Rendezvous, text: str = "same") -> Callable[[], Exception]:
    def run() -> Exception:
        with pytest.raises((RankFailedError, RankMismatchError)) as caught:
            _comparing(room, text)()
        return caught.value

    return run


def test_a_rank_that_does_not_come_is_named() -> None:
    present = _rooms(dist.HashStore(), (4, 5, 6), timeout_s=0.2)[:2]
    for error in _at_once(*map(_failure, present)):
        assert isinstance(error, RankFailedError)
        assert "rank 6 did not compile its next collectives within 0.2 s" in str(error)
        assert "called there all the same, with an empty tensor" in str(error)


def test_who_waits_in_another_group_hears_of_a_failure_at_once_and_so_does_who_comes_later() -> None:
    store = dist.HashStore()
    first, second = _rooms(store, (4, 6)), _rooms(store, (5, 7))
    error = RankMismatchError("it went wrong", where="elsewhere", instead="something else")
    begin_s = time.monotonic()

    def tell() -> Exception:
        second[1].tell(error)
        second[1].tell(RankFailedError("what follows from it"))
        return error

    heard, _ = _at_once(_failure(second[0]), tell)
    later = _failure(second[1])()
    assert time.monotonic() - begin_s < TIMEOUT_S / 2
    for each in (heard, later):
        assert isinstance(each, RankMismatchError)
        assert str(each) == str(error)
    assert _at_once(*(_comparing(room, "same") for room in first)) == [None, None], "another group goes on"


def test_pauses_are_those_of_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def pauses(ranks: int) -> Iterator[float]:
        asked.append(ranks)
        return itertools.repeat(0.01)

    monkeypatch.setattr(rendezvous, "pauses", pauses)
    assert isinstance(_failure(_rooms(dist.HashStore(), (4, 5, 6), timeout_s=0.05)[0])(), RankFailedError)
    assert asked == [3]


class _Lost(dist.Store):
    """The store of a process that has died."""

    def __getattribute__(self, name: str) -> Callable[..., object]:
        def fail(*_: object) -> object:
            raise dist.DistNetworkError("Connection reset by peer")

        return fail


def test_a_store_that_fails_is_no_mismatch() -> None:
    room = Rendezvous(AnsweringStore(_Lost(), TIMEOUT_S), "4-5", (4, 5), 1, TIMEOUT_S)
    with pytest.raises(RankFailedError, match=r"does not answer: Connection reset by peer\n.*where: rank 5"):
        room.first(1, "", "")
    room.tell(RankFailedError("nobody can hear this"))
