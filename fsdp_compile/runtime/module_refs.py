"""The places where a parameter is registered, and the parameters that stand where an ignored one stood."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import nn


class ModuleRefs(Sequence[tuple[nn.Module, str]]):
    """Every (module, attribute) that registers a parameter; modules that are deleted are left out."""

    def __init__(self, refs: Iterable[tuple[nn.Module, str]]) -> None:
        self._refs = [(weakref.ref(module), attribute) for module, attribute in refs]

    def append(self, module: nn.Module, attribute: str) -> None:
        """Adds one more."""
        self._refs.append((weakref.ref(module), attribute))

    def __iter__(self) -> Iterator[tuple[nn.Module, str]]:
        for reference, attribute in self._refs:
            module = reference()
            if module is not None:
                yield module, attribute

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, index: int) -> tuple[nn.Module, str]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[nn.Module, str]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return list(self)[index]


class IgnoredParams:
    """The parameters that `fully_shard` was told to leave alone, by `id`, and what has taken their places since.

    `to_empty()` and `materialize()` of a model on meta, and `load_state_dict(assign=True)`, register new parameters.
    """

    def __init__(self, root: nn.Module | None = None, ids: Iterable[int] = ()) -> None:
        self._ids = set(ids)
        # A scripted module makes the objects of its parameters anew for each look.
        inside = [] if root is None else [m for m in root.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._places = ModuleRefs((m, a) for m in inside for a, p in m._parameters.items() if id(p) in self._ids)

    def __contains__(self, identity: int) -> bool:
        return identity in self._ids or identity in self.ids()

    def ids(self) -> set[int]:
        """The `id`s of those that were listed, and of those that are in their places now."""
        held = (module._parameters.get(attribute) for module, attribute in self._places)
        self._ids.update(id(parameter) for parameter in held if parameter is not None)
        return self._ids
