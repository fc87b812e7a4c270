"""Flat shards are found where the last call had them, and looked for where it had others."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import fsdp_compile
from fsdp_compile.parameters.finder import Finder
from fsdp_compile.parameters.flat import FlatShard
from tests.fake_world import fake_world


def _flats(model: nn.Module) -> list[FlatShard]:
    return [flat for unit in fsdp_compile.units(model) for flat in unit.flats]


@pytest.mark.core
def test_each_call_finds_what_it_was_given() -> None:
    with fake_world(2):
        flats = _flats(fsdp_compile.fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))))
        leaves = [flat.leaf for flat in flats]
        finder = Finder()
        for _ in range(2):
            assert finder.find(leaves) == flats
            assert finder.find([leaf.detach() for leaf in leaves]) == flats, "other tensors of the same memory"
            assert finder.find([leaves[0].detach().clone(), *leaves[1:]]) == [None, *flats[1:]]
            assert finder.find([leaves[0].detach()[:1], *leaves[1:]]) == [None, *flats[1:]], "a part of it"
            assert finder.find(leaves[::-1]) == flats[::-1]


def test_what_was_found_is_not_kept() -> None:
    finder = Finder()
    with fake_world(2):
        (flat,) = _flats(fsdp_compile.fully_shard(nn.Linear(3, 3)))
        assert finder.find([flat.leaf]) == [flat]
        leaf, reference = flat.leaf, weakref.ref(flat)
        del flat
        gc.collect()
        assert reference() is None
        assert finder.find([torch.nn.Parameter(leaf.detach())]) == [None]
