"""The flat shards among the inputs of one compiled graph: in nearly every call those of the last."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence

import torch
from torch import nn

from fsdp_compile.parameters.flat import FlatShard

_leaf = operator.attrgetter("leaf")
_PLAIN = {torch.Tensor, nn.Parameter}


class Finder:
    """`FlatShard.of` for many tensors at once, with no Python code for each while they are where they were.

    Attributes:
        changes: How often others may have been found than the time before.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._places: tuple[list[int], list[int]] = ([], [])
        self._found: list[weakref.ref[FlatShard]] = []  # graphs may live longer

    def find(self, leaves: Sequence[torch.Tensor]) -> Sequence[FlatShard | None]:
        """The flat shard whose buffer each tensor is."""
        if not _PLAIN.issuperset(map(type, leaves)):
            self.changes += 1
            self._found = []
            return list(map(FlatShard.of, leaves))
        known = [reference() for reference in self._found]
        if None not in known and len(known) == len(leaves) and self._are_of(known, leaves):
            return known
        self.changes += 1
        found = list(map(FlatShard.of, leaves))
        self._places = _places(leaves)
        self._found = [] if None in found else [weakref.ref(flat) for flat in found if flat is not None]
        return found

    def _are_of(self, known: Sequence[FlatShard | None], leaves: Sequence[torch.Tensor]) -> bool:
        # While a flat shard lives, nothing else has its address. Mostly its own leaf comes, as an object of Python's.
        return all(map(operator.is_, map(_leaf, known), leaves)) or self._places == _places(leaves)


def _places(leaves: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    return list(map(torch.Tensor.data_ptr, leaves)), list(map(torch.Tensor.numel, leaves))
