"""Gradients that one compiled backward makes: they arrive one right after the other, and are handed over together.

What is done once for each of many small flat shards would take longer than what is done for their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fsdp_compile._torch import backward_in_progress

if TYPE_CHECKING:
    from fsdp_compile.parameters.flat import FlatShard


class Together:
    """Small flat shards, of one dtype and device, that a backward graph makes gradients of."""

    def __init__(self) -> None:
        self._backward = backward_in_progress()
        self._expected: list[FlatShard] = []
        self._arrived: dict[FlatShard, torch.Tensor] = {}

    def expect(self, flat: FlatShard) -> None:
        """Notes that the graph makes a gradient of all slots of a flat shard."""
        flat.together = self
        self._expected.append(flat)

    def take(self, flat: FlatShard, gradient: torch.Tensor) -> bool:
        """Keeps a gradient that has arrived until it is handed over.

        Returns:
            Whether it did. Not what belongs to another backward: what one left behind that failed is forgotten.
        """
        if self._backward != backward_in_progress() or flat in self._arrived or type(gradient) is not torch.Tensor:
            return False
        self._arrived[flat] = gradient
        return True

    @property
    def is_complete(self) -> bool:
        """Whether all have arrived. Not while one waits for another graph that makes gradients of it."""
        return len(self._arrived) == len(self._expected)

    def give_away(self) -> Mapping[FlatShard, torch.Tensor]:
        """What has arrived in this backward, in the same order in every step."""
        arrived, self._arrived = self._arrived, {}
        for flat in self._expected:
            if flat.together is self:
                flat.together = None
        if self._backward != backward_in_progress():
            return {}
        return {flat: arrived[flat] for flat in self._expected if flat in arrived}
