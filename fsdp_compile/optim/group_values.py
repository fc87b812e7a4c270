"""What an optimizer's step writes into its groups, as counters of its steps, where one step runs more than once."""

from __future__ import annotations

import copy
from typing import Any

import torch

Values = dict[str, Any]
"""The entries of a group but its parameters; tensors are copies."""


def values_of(group: dict[str, Any]) -> Values:
    """The entries of a group but its parameters, as they are now."""
    return {key: _copied(value) for key, value in group.items() if key != "params"}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, list | dict | set) else value


def difference(one: Values, other: Values) -> str | None:
    """The name of an entry that only one of them has, or that differs; `None` if they are equal."""
    for key in one.keys() | other.keys():
        if key not in one or key not in other or not _are_equal(one[key], other[key]):
            return key
    return None


class Rewound:
    """A group whose step runs again and again, each time from the same entries.

    What is in place of the entries in the end is what the last run has left: a step counter has counted once.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._entries = {key: value for key, value in group.items() if key != "params"}
        self._before = values_of(group)

    def rewind(self) -> None:
        """Puts back the entries that the group had at first, the same tensors among them."""
        group = self._group
        for key in group.keys() - self._entries.keys() - {"params"}:
            del group[key]
        for key, value in self._entries.items():
            if isinstance(value, torch.Tensor):
                value.detach().copy_(self._before[key])
                group[key] = value
            else:
                group[key] = _copied(self._before[key])


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    return one is other or bool(one == other)
