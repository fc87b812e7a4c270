"""A store whose operations end in time, also when the host that holds it is cut off.

Torch's store over TCP notices at once that the process which holds it has ended. Where a link is cut nothing arrives,
and its operations wait, whatever their timeout, until TCP gives the connection up: about a quarter of an hour.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_FIRST_PAUSE_S: Final = 1e-3
_LEAST_LONGEST_PAUSE_S: Final = 0.1
_LOOKS_PER_S: Final = 2000
"""At how many looks per second, of all ranks together, the process that holds the store still has time for other work:
a look is up to four requests, and a request takes it about 28 us (`python -m benchmarks.agreement`)."""


class AnsweringStore:
    """A store, and for how many seconds to wait for what it answers; its methods are torch's.

    Raises:
        RuntimeError: From every method, if the store fails or does not answer in time.
    """

    def __init__(self, store: dist.Store, seconds: float) -> None:
        self._store = store
        self._seconds = seconds

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._ask(lambda: self._store.check(list(keys)))

    def get(self, key: str) -> bytes:
        """The value of a key; waits for it."""
        return self._ask(lambda: self._store.get(key))

    def set(self, key: str, value: str) -> None:
        """Writes a key."""
        self._ask(lambda: self._store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, which begins at 0, and returns the sum."""
        return self._ask(lambda: self._store.add(key, amount))

    def delete_key(self, key: str) -> bool:
        """Deletes a key; returns whether it was there."""
        return self._ask(lambda: self._store.delete_key(key))

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those keys that are not there: halves what is not all there, so that few of many take few requests."""
        if not keys or self.check(keys):
            return []
        if len(keys) == 1:
            return list(keys)
        middle = len(keys) // 2
        return [*self.missing(keys[:middle]), *self.missing(keys[middle:])]

    def _ask(self, operation: Callable[[], T]) -> T:
        answers: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                answers.append(operation())
            except BaseException as error:
                errors.append(error)

        # A daemon: a process that ends does not wait for an operation that never does.
        asking = threading.Thread(target=run, name="fsdp_compile store", daemon=True)
        asking.start()
        asking.join(self._seconds)
        if asking.is_alive():
            raise RuntimeError(f"no answer within {self._seconds:g} s")
        if errors:
            raise errors[0]
        return answers[0]


def pauses(ranks: int) -> Iterator[float]:
    """Seconds between the looks of one of some ranks that wait for the same: short at first, then as many allow."""
    pause_s, longest_s = _FIRST_PAUSE_S, max(_LEAST_LONGEST_PAUSE_S, ranks / _LOOKS_PER_S)
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)
