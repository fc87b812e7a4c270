"""A small Llama whose tokens are split over a context mesh, with torch's ring attention on the CPU.

`context_parallel` knows the attention kernels of GPUs alone: on the CPU its DTensors end in "does not have a sharding
strategy registered". `cpu_kernels()` adds the CPU's flash attention to its table, so that torch's ring runs there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
from torch.distributed.tensor.parallel import parallelize_module

from tests.models.tensor_parallel import VOCABULARY, WIDTH, Attention, Llama, heads

torchs: Any = _attention
LENGTH = 16
"""Of a whole sequence."""
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_TOKENS = 2
"""The dimension of queries, keys and values that is split."""


class _Inner(nn.Module):
    """Attention alone, which torch's `_ContextParallel` style takes."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class _Attention(Attention):
    """The same in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.inner(*(heads(p(x)) for p in (self.q, self.k, self.v))).transpose(1, 2).flatten(2))


class PositionedLlama(Llama):
    """Learned positions, which are split with the tokens."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__(layers)
        self.places = nn.Embedding(LENGTH, WIDTH)
        for layer in self.layers:
            layer.attention = _Attention()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The loss of predicting `targets`; all three are `[batch, length]`."""
        x = self.embedding(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sequences(seed: int, batch: int = 2) -> list[torch.Tensor]:
    """Tokens, positions and targets of whole sequences, `[batch, LENGTH]` each."""
    drawn = torch.randint(0, VOCABULARY, (batch, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return [drawn[:, :-1].contiguous(), torch.arange(LENGTH).repeat(batch, 1), drawn[:, 1:].contiguous()]


@contextmanager
def split_by_context(mesh: DeviceMesh, batch: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """This rank's tokens of a batch, in torch's `context_parallel`, which replaces `F.scaled_dot_product_attention`."""
    with context_parallel(mesh, buffers=batch, buffer_seq_dims=[1] * len(batch)):
        yield batch


@contextmanager
def split_by_modules(mesh: DeviceMesh, batch: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The same in the newer way of torch, for a model that `split_attention` was called on."""
    balancer = _HeadTailLoadBalancer(LENGTH, mesh.size(), "cpu")
    torchs._enable_context_parallel_dispatcher()
    try:
        yield torchs._context_parallel_shard(mesh, batch, [1] * len(batch), balancer)
    finally:
        torchs._disable_context_parallel_dispatcher()


def split_attention(model: PositionedLlama, mesh: DeviceMesh) -> None:
    """Gives attention to torch's parallel style."""
    style = torchs._ContextParallel(seq_dim=_TOKENS, attention_type=torchs._ContextParallel.AttentionType.SDPA)
    for layer in model.layers:
        parallelize_module(layer, mesh, {"attention.inner": style})


@contextmanager
def cpu_kernels() -> Iterator[None]:
    """Lets torch's `context_parallel` call the CPU's flash attention in the block, forward and backward."""
    torchs.custom_ops.update({_FORWARD: _ring, _BACKWARD: _ring})
    try:
        yield
    finally:
        del torchs.custom_ops[_FORWARD], torchs.custom_ops[_BACKWARD]


def _ring(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """The handler of an operator on DTensors that are split over tokens, like torch's for GPUs."""
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mesh = given["query"].device_mesh
    local = {name: value._local_tensor if isinstance(value, DTensor) else value for name, value in given.items()}
    if operator is _FORWARD:
        results = torchs._templated_ring_attention(mesh.get_group(), _TOKENS, operator, **local)
    else:
        results = torchs._templated_ring_attention_backward(
            mesh.get_group(), _TOKENS, operator, grad_out_name="grad_out", **local
        )
    return tuple(DTensor(each, _split(each, mesh), requires_grad=False) for each in results)


def _split(local: torch.Tensor, mesh: DeviceMesh) -> DTensorSpec:
    shape = list(local.shape)
    shape[_TOKENS] *= mesh.size()
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensorSpec(mesh, (Shard(_TOKENS),), tensor_meta=meta)
