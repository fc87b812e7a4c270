"""Graphs with functions that read parameters, and with unusual inputs: as in one process, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._higher_order_ops.map import map as map_
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.nn.attention.flex_attention import flex_attention

from fsdp_compile import fully_shard, no_sync
from tests import long
from tests.fake_world import fake_world
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess, close, compare_gradients, compile_eagerly, loss_of, made

WIDTH = 6


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(x))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class _Cond(_Layers):
    """The branch with `a` is never taken: its gradients are zeros."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 1e9, lambda y: -self.a(y), lambda y: torch.sin(self.b(y)), (x,))


class _ReadTwice(_Layers):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        taken = torch.cond(x.sum() < 1e9, lambda y: -self.a(y), lambda y: self.a(y) + self.b(y), (self.a(x),))
        return torch.tanh(taken)


class _NestedCond(_Layers):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        def other(y: torch.Tensor) -> Any:
            return torch.cond(y.sum() > -1e9, lambda z: -self.b(z), lambda z: -torch.cos(z), (y,))

        return torch.cond(x.sum() > 1e9, lambda y: -self.a(y), other, (x,))


class _Loop(_Layers):
    """A loop of any length takes no gradients."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            start = (torch.tensor(0), x)
            _, y = while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, torch.tanh(self.a(y))), start)
        return self.a(y) + self.b(x)


class _Scan(_Layers):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.stack([x, 2 * x, 3 * x])
        _, y = scan(lambda c, v: (torch.tanh(self.a(c) + v), self.b(c) + v), torch.zeros_like(x), steps)
        return y.sum(0)


class _Map(_Layers):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.stack([self.b(x), 2 * x, 3 * x])
        return map_(lambda v: torch.sin(self.a(v)), steps).sum(0)  # type: ignore[misc,arg-type]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(x))


class _Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


MODELS: list[Callable[[], nn.Module]] = [_Cond, _ReadTwice, _NestedCond, _Loop, _Scan, _Map]


@long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.SHARDED], ids=lambda how: how.value)
@long.parametrize("make", MODELS, always=[_NestedCond])
@on_ranks()
def test_functions_read_as_in_one_process(make: Callable[[], nn.Module], how: Run) -> None:
    """Branches that are not taken give zeros, as plain `torch.compile` does, and not `None`."""
    pair = WithOneProcess(make, how, shape=WIDTH)
    pair.train()


@pytest.mark.long
@on_ranks()
def test_ranks_may_take_different_branches() -> None:
    """Each gathers the parameters of both, so nothing hangs."""
    model, reference, rank = made(_Cond), made(_Cond), torch.distributed.get_rank()
    scales = (1e9, 1.0)
    (loss_of(compile_eagerly(model)(torch.ones(2, WIDTH) * scales[rank])) / scales[rank] ** 2).backward()
    for scale in scales:
        (loss_of(reference(torch.ones(2, WIDTH) * scale)) / scale**2 / 2).backward()
    compare_gradients(model, reference)


class _Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> Any:
        return flex_attention(x, x, x, score_mod=lambda score, _b, head, _i, _j: score + self.bias[head])


def test_other_functions_that_read_are_refused() -> None:
    with fake_world(2), pytest.raises(BackendCompilerFailed, match=r"higher_order\.flex_attention reads a parameter"):
        compile_eagerly(_Bias())(torch.randn(1, 2, 4, 4))


def test_nested_regions_are_refused() -> None:
    with fake_world(2), pytest.raises(BackendCompilerFailed, match=r"(?s)nested_compile_region.*'regions': 'blocks'"):
        compile_eagerly(_Regions())(torch.ones(2, WIDTH))


class _Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x @ self.made())

    def made(self) -> torch.Tensor:
        raise NotImplementedError


class _Tangent(_Weight):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = torch.func.jvp(lambda y: torch.tanh(y @ self.weight), (x,), (torch.ones_like(x),))
        return self.out(results[0]) + results[1]


class _Experts(nn.Module):
    """The number of rows of each expert depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(scores.argmax(-1) == number).squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]) * scores[rows, number : number + 1])
        return out


INPUTS_MODELS: list[Callable[[], nn.Module]] = [_Tangent, _Experts]
"""Others are rows of tests/fuzz/catalogue.py."""


@long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.SHARDED], ids=lambda how: how.value)
@long.parametrize("make", INPUTS_MODELS, always=[_Experts])
@on_ranks()
def test_unusual_graphs_train_as_in_one_process(make: Callable[[], nn.Module], how: Run) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        pair = WithOneProcess(make, how, shape=WIDTH)
        pair.train()


def _gradient(function: Callable[..., Any], x: torch.Tensor) -> Any:
    return torch.func.grad(function)(x)


def _tangent(function: Callable[..., Any], x: torch.Tensor) -> Any:
    return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]


@pytest.mark.skipif(
    not hasattr(_fsdp_common, "_disable_functorch_if_active"),
    reason="Python reads the parameters here, and this torch's FSDP2 cannot gather them inside of a transform (2.11)",
)
@long.parametrize("transform", [_gradient, _tangent], always=[_gradient])
@on_ranks()
def test_the_first_call_may_be_inside_of_a_transform(transform: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    expected = transform(lambda y: torch.sin(model(y)).sum(), x)
    compiled = compile_eagerly(model)
    close(transform(lambda y: torch.sin(compiled(y)).sum(), x), expected, "derivative")


class _WithTarget(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = torch.tanh(self.layer(x))
        return self.layer(x) - target


@long.parametrize("make", [_Cond, _Scan, _WithTarget], always=[_Scan, _WithTarget])
@on_ranks()
def test_microbatches_accumulate_without_reduction(make: Callable[[], nn.Module]) -> None:
    pair = WithOneProcess(make, shape=WIDTH, twice=False)
    for _ in range(2):
        with no_sync(pair.model):
            pair.backward()
        pair.backward()
    pair.compare_gradients()


class _Strided(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.as_strided(self.weight, (2, 4), (4, 1), 4).sum()


def test_a_view_from_a_place_in_the_storage_of_a_parameter_is_refused() -> None:
    with fake_world(2):
        compiled = compile_eagerly(fully_shard(_Strided(4, 4)))
        with pytest.raises(Exception, match=r"storage_offset[\s\S]*test_functions.py"):
            compiled(torch.randn(2, 4))
