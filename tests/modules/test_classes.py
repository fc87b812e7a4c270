"""The class of a sharded module: its name, and what cannot be done with it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fsdp_compile import UnsupportedModelError, full_params, fully_shard
from tests.fake_world import fake_world


class Outer(nn.Module):
    """A module that holds a sharded one."""

    class Inner(nn.Linear):
        """A class inside of a class."""


def test_a_class_is_named_after_the_users_as_with_fsdp2() -> None:
    with fake_world(2):
        linear, inner = fully_shard(nn.Linear(2, 2)), fully_shard(Outer.Inner(2, 2))
        with full_params(linear):
            assert type(linear) is nn.Linear
    assert (type(linear).__name__, type(linear).__qualname__) == ("FSDPLinear", "FSDPLinear")
    assert type(inner).__qualname__ == "Outer.FSDPInner"
    assert isinstance(linear, nn.Linear)
    assert type(linear).__doc__ == nn.Linear.__doc__


def test_layers_of_one_layout_share_a_class_and_others_do_not() -> None:
    with fake_world(2):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 6))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    first, second, third = (type(layer) for layer in model)
    assert first is second
    assert first is not third


@pytest.mark.parametrize("save", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
def test_pickling_a_module_is_refused_by_name(save) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    with fake_world(2):
        model = nn.Sequential(fully_shard(nn.Linear(2, 2)))
        with pytest.raises(UnsupportedModelError, match="cannot be pickled") as caught:
            save(model)
        assert "where: Linear" in str(caught.value)
        assert "state_dict()" in str(caught.value)
        with pytest.raises(UnsupportedModelError, match="cannot be deep-copied"):
            copy.deepcopy(model)


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.deepcopy])
def test_so_it_is_inside_of_full_params(duplicate: Callable[[nn.Module], object]) -> None:
    with fake_world(1):
        model = fully_shard(nn.Linear(2, 2))
        with (
            full_params(model, writeback=False),
            pytest.raises(UnsupportedModelError, match="also where its parameters are full") as caught,
        ):
            duplicate(model)
        assert "state_dict()" in str(caught.value)


class Tagged:
    """A base class that asks each subclass for an argument, and counts them."""

    subclasses = 0

    def __init_subclass__(cls, *, tag: str) -> None:
        Tagged.subclasses += 1
        cls.tag = tag  # type: ignore[attr-defined]


class TaggedLinear(Tagged, nn.Linear, tag="a"):
    """What a user writes."""


def test_a_base_that_asks_subclasses_for_an_argument_does_not_see_ours() -> None:
    before = Tagged.subclasses
    with fake_world(2):
        model = fully_shard(TaggedLinear(2, 2))
    assert type(model).__name__ == "FSDPTaggedLinear"
    assert model.tag == "a"
    assert Tagged.subclasses == before
