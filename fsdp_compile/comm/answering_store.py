"""A store whose operations end in time, also when the host that holds it is cut off.

Torch's store over TCP notices at once that the process which holds it has ended. Where a link is cut nothing arrives,
and its operations wait, whatever their timeout, until TCP gives the connection up: about a quarter of an hour.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


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
