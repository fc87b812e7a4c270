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
        self._places: tuple[list[int], list[int]] = ([], [])
        self._found: list[weakref.ref[FlatShard]] = []  # graphs may live longer

    def find(self, leaves: Sequence[torch.Tensor]) -> Sequence[FlatShard | None]:
        """The flat shard whose buffer each tensor is."""
        if not _PLAIN.issuperset(map(type, leaves)):
            self.changes += 1
            self._places = [], []
            return list(map(FlatShard.of, leaves))
        places = list(map(torch.Tensor.data_ptr, leaves)), list(map(torch.Tensor.numel, leaves))
        if places == self._places:
            # While a flat shard lives, nothing else has its address.
            known = [reference() for reference in self._found]
            if None not in known:
                return known
        self.changes += 1
        self._places = [], []
        found = list(map(FlatShard.of, leaves))
        if None not in found:
            self._places, self._found = places, [weakref.ref(flat) for flat in found if flat is not None]
        return found
