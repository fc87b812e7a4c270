"""Objects are found by their class, whatever they answer when they are asked; a pause of the collector ends."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from fsdp_compile.heap import collector_paused, instances_of


class _Wanted:
    """Held in a list, as the collector knows containers and what has attributes."""


class _Below(_Wanted):
    """A subclass."""


class _Pretender:
    """A proxy, as some libraries make them."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError("was asked")


def test_instances_of_subclasses_are_found_and_proxies_are_not_asked() -> None:
    first, second, _pretender = _Wanted(), _Below(), _Pretender()
    found = instances_of(_Wanted)
    assert {id(each) for each in found} == {id(first), id(second)}
    assert instances_of(_Below) == [second]


@collector_paused()
def _fail_in_a_pause() -> None:
    assert not gc.isenabled()
    raise ValueError("inside")


@pytest.mark.parametrize("before", [gc.enable, gc.disable])
def test_the_collector_goes_on_after_a_pause_if_it_ran_before(before: Callable[[], None]) -> None:
    before()
    runs = gc.isenabled()
    try:
        for _ in range(2):
            with pytest.raises(ValueError, match="inside"):
                _fail_in_a_pause()
            assert gc.isenabled() is runs
    finally:
        gc.enable()
