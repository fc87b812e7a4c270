"""The places where a parameter is registered."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

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
