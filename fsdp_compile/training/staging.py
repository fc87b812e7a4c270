"""Copies of training state in host memory, from which a thread can write while training changes the state."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import make_dtensor

_Path = tuple[str | int, ...]
"""Keys and indices that lead to a value of nested state."""


class HostBuffers:
    """Host memory for one copy of nested state; each copy overwrites the one before.

    Memory for tensors of a GPU is pinned, so that they are copied at the speed of the bus.
    """

    def __init__(self) -> None:
        self._buffers: dict[_Path, Tensor] = {}

    def stage(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of nested dictionaries and lists; it is complete when this returns.

        Args:
            state: DTensors (this rank's part is copied), tensors, and plain values.
        """
        before, self._buffers = self._buffers, {}
        staged: dict[str, Any] = self._staged(state, (), before)
        if any(buffer.is_pinned() for buffer in self._buffers.values()):
            torch.cuda.current_stream().synchronize()
        return staged

    def _staged(self, value: Any, path: _Path, before: Mapping[_Path, Tensor]) -> Any:
        if isinstance(value, Mapping):
            return {key: self._staged(each, (*path, key), before) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._staged(each, (*path, number), before) for number, each in enumerate(value))
        if isinstance(value, DTensor):
            return make_dtensor(self._copied(value.to_local(), path, before), value)
        if isinstance(value, Tensor):
            return self._copied(value, path, before)
        return copy.deepcopy(value)

    def _copied(self, tensor: Tensor, path: _Path, before: Mapping[_Path, Tensor]) -> Tensor:
        tensor = tensor.detach()
        buffer = before.get(path)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._buffers[path] = buffer
        return buffer.copy_(tensor, non_blocking=True)
