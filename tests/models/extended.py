"""Parameters with all-gather extensions: stored in float32, sent in fewer bits, by methods of their class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_OF_THE_CLASS = {
    _aten.detach.default,
    _aten.clone.default,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.split.Tensor,
    _aten.slice.Tensor,
    _aten.view.default,
    _aten.as_strided.default,
    _aten._to_copy.default,
    _aten.copy_.default,
    _aten.add_.Tensor,
    _aten.mul_.Tensor,
    _aten.addcdiv_.default,
}


class Wrapped(torch.Tensor):
    """A tensor that wraps one: its class survives what shards and updates parameters; other results are plain."""

    wrapped: torch.Tensor

    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.wrapped = inner

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes arguments
        return f"{type(self).__name__}({self.wrapped!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["wrapped"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: object) -> Wrapped:
        return cls(inner["wrapped"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        out = func(*tree_map_only(Wrapped, _inner, args), **tree_map_only(Wrapped, _inner, kwargs))
        if func not in _OF_THE_CLASS:
            return out
        out = tree_map_only(torch.Tensor, cls, out)
        return return_and_correct_aliasing(func, args, kwargs, out)


def _inner(tensor: Wrapped) -> torch.Tensor:
    return tensor.wrapped


def _padded(shard: torch.Tensor, size: torch.Size, ranks: int) -> torch.Tensor:
    rows = -(-size[0] // ranks)
    return torch.nn.functional.pad(shard, [0, 0] * (shard.dim() - 1) + [0, rows - shard.shape[0]])


class Half(Wrapped):
    """One that is sent in bfloat16."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, _stride: Any, module: Any, policy: Any) -> Any:
        assert isinstance(module, nn.Module)
        assert hasattr(policy, "param_dtype")
        return (_padded(self.wrapped.to(torch.bfloat16), size, mesh.size()),), None

    def fsdp_post_all_gather(
        self, outputs: Sequence[torch.Tensor], _metadata: None, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return _given(outputs[0].to(param_dtype), outputs, out)


class Released(Half):
    """One that torch, from 2.15 on, need not keep in the bits that were sent."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


class Eight(Wrapped):
    """One that is sent in 8 bits, with a scale for each row; metadata says what the largest number is."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, _stride: Any, _module: Any, _policy: Any) -> Any:
        whole = _padded(self.wrapped, size, mesh.size())
        scales = whole.abs().amax(dim=list(range(1, whole.dim())), keepdim=True).clamp(min=1e-12) / 127
        return ((whole / scales).round().to(torch.int8), scales), {"largest": 127}

    def fsdp_post_all_gather(
        self, outputs: Sequence[torch.Tensor], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert metadata == {"largest": 127}
        numbers, scales = outputs
        return _given((numbers.to(scales.dtype) * scales).to(param_dtype), outputs, out)


class Pair(TwoTensor):
    """Two tensors, both of which are sent; the unsharded parameter is a pair, and so are its gradients."""

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _metadata: None, size: Any, stride: Any) -> Pair:
        return Pair(inner["a"], inner["b"], size, stride)

    def fsdp_pre_all_gather(self, _mesh: Any) -> Any:
        return (self.a, self.b), None

    def fsdp_post_all_gather(
        self, outputs: Sequence[torch.Tensor], _metadata: None, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert param_dtype is outputs[0].dtype
        return None if out is not None else (Pair(*outputs), outputs)


def _given(value: torch.Tensor, outputs: Sequence[torch.Tensor], out: torch.Tensor | None) -> Any:
    """What FSDP2 is given: a new tensor, or the earlier one written anew."""
    if out is None:
        return value, (*outputs, value)
    with torch.no_grad(), _unsafe_preserve_version_counter(out):
        out.copy_(value[: out.shape[0]])
    return None


class Layers(nn.Module):
    """Layers of rows that 2 ranks share evenly, or not; some weights of a class, the others plain."""

    def __init__(self, kind: type[Wrapped] | None, rows: int = 8) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(6, rows), nn.Linear(rows, rows), nn.Linear(rows, 6)
        if kind is not None:
            self.up.weight = nn.Parameter(kind(self.up.weight.detach()))
            self.down.weight = nn.Parameter(kind(self.down.weight.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.middle(torch.tanh(self.up(x)))))
