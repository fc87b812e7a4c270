"""The objects that this process holds: which are of a class, and when garbage is looked for among them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def instances_of(wanted: type[T]) -> list[T]:
    """Every live object of a class or of a subclass of it, in no order.

    A process that has imported torch holds some half a million objects: they are told apart by the identity of
    `type(o)` alone. `isinstance()` takes ten times as long, and asks proxies for their `__class__`, which may run code.
    """
    types = {id(each) for each in _with_subclasses(wanted)}
    return [candidate for candidate in gc.get_objects() if id(type(candidate)) in types]


def _with_subclasses(wanted: type[Any]) -> Iterator[type[Any]]:
    yield wanted
    for each in type.__subclasses__(wanted):
        yield from _with_subclasses(each)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Leaves cyclic garbage for later, where many objects are made that stay.

    While Dynamo compiles, a search through all objects takes a second or two, and new graph nodes bring it about.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()
