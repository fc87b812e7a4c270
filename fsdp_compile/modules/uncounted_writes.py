"""Functions whose names do not tell that they write into tensors, and which count some of these writes nowhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class _Argument(NamedTuple):
    """Where a function takes an argument, and its default."""

    position: int
    name: str
    default: object = None

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[self.position] if len(args) > self.position else kwargs.get(self.name, self.default)


_WRITTEN_IF: dict[Callable[..., Any], tuple[_Argument, tuple[_Argument, ...]]] = {
    F.batch_norm: (_Argument(5, "training"), (_Argument(1, "running_mean"), _Argument(2, "running_var"))),
    torch.batch_norm: (_Argument(5, "training"), (_Argument(3, "running_mean"), _Argument(4, "running_var"))),
    torch.native_batch_norm: (_Argument(5, "training"), (_Argument(3, "running_mean"), _Argument(4, "running_var"))),
    F.instance_norm: (
        _Argument(5, "use_input_stats", default=True),
        (_Argument(1, "running_mean"), _Argument(2, "running_var")),
    ),
    F.embedding: (_Argument(3, "max_norm"), (_Argument(1, "weight"),)),
    F.embedding_bag: (_Argument(3, "max_norm"), (_Argument(1, "weight"),)),
}
"""If the first argument is true, or not `None`, they write into the others."""


def may_write(function: object) -> bool:
    """Whether a function is one of these."""
    return function in _WRITTEN_IF


def written_by(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments into which a call of one of these functions writes."""
    condition, written = _WRITTEN_IF[function]
    asked = condition.of(args, kwargs)
    return [each.of(args, kwargs) for each in written] if asked is not None and asked is not False else []
