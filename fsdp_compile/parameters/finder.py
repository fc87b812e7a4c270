"""The flat shards among the inputs of one compiled graph: in nearly every call those of the last."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from fsdp_compile.parameters.flat import FlatShard

_PLAIN = {torch.Tensor, nn.Parameter}


class Finder:
    """`FlatShard.of` for many tensors at once, with no Python code for each while they are where they were.

    Attributes:
        changes: How often others may have been found than the time before.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._identities: list[int] = []
        self._places: tuple[list[int], list[int]] = ([], [])
        self._found: list[weakref.ref[FlatShard]] = []  # graphs may live longer

    def find(self, leaves: Sequence[torch.Tensor]) -> Sequence[FlatShard | None]:
        """The flat shard whose buffer each tensor is."""
        if not _PLAIN.issuperset(map(type, leaves)):
            self.changes += 1
            self._found = []
            return list(map(FlatShard.of, leaves))
        known = [reference() for reference in self._found]
        # While a flat shard lives, nothing else has its leaf's identity, or its address. Mostly it is the leaf itself.
        is_known = known and None not in known
        if is_known and (self._identities == list(map(id, leaves)) or self._places == _places(leaves)):
            return known
        self.changes += 1
        found = list(map(FlatShard.of, leaves))
        flats = [flat for flat in found if flat is not None]
        is_found = len(flats) == len(found)
        self._found = list(map(weakref.ref, flats)) if is_found else []
        self._identities = [id(flat.leaf) for flat in flats]
        self._places = _places(leaves)
        return found


def _places(leaves: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    return list(map(torch.Tensor.data_ptr, leaves)), list(map(torch.Tensor.numel, leaves))
