"""Writes into a parameter inside of a forward are refused, however they are made."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_compile import UnsupportedModelError, fully_shard
from tests.fake_world import fake_world
from tests.two_sides import compile_eagerly


@torch.library.custom_op("fsdp_compile_tests::halve", mutates_args=("x",))
def _halve(x: torch.Tensor) -> None:
    x.mul_(0.5)


def _vector(parameter: torch.Tensor) -> None:
    torch.nn.utils.vector_to_parameters(torch.ones(6), [parameter])


def _assign_data(parameter: torch.Tensor) -> None:
    parameter.data = parameter.data * 0.5


_WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "foreach-data": lambda p: torch._foreach_mul_([p.data], 0.5),
    "data": lambda p: p.data.mul_(0.5),
    "out": lambda p: torch.mul(p, 0.5, out=p),
    "normalize": lambda p: F.normalize(p, dim=0, out=p),
    "packet": lambda p: torch.ops.aten.mul_(p, 0.5),
    "overload": lambda p: torch.ops.aten.mul_.Scalar(p, 0.5),
    "custom": torch.ops.fsdp_compile_tests.halve,
    "custom-data": lambda p: torch.ops.fsdp_compile_tests.halve(p.data),
    "relu": lambda p: F.relu(p, inplace=True),
    "clamp": lambda p: p.clamp_(-1, 1),
    "several": lambda p: p.mul_(0.9).add_(p.detach(), alpha=0.1),
    "setitem": lambda p: p.__setitem__(0, 1.0),
    "view": lambda p: p[:3].zero_(),
    "init": nn.init.ones_,
    "renormalized": lambda p: F.embedding(torch.tensor([0]), p.reshape(3, 2), max_norm=0.1),
}
_ASSIGNMENTS = {"assigned": _assign_data, "vector": _vector}
_STATISTICS = {
    "statistics": lambda p: F.batch_norm(torch.randn(4, 6), p, torch.ones(6), training=True),
    "instance-statistics": lambda p: F.instance_norm(torch.randn(2, 6, 4), p, torch.ones(6)),
}


class _Writes(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.own, self.layer, self.write = nn.Parameter(torch.ones(6)), nn.Linear(6, 6), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self.own)
        return self.layer(x) * self.own


@pytest.mark.parametrize("name", [*_WRITES, *_STATISTICS])
def test_writes_inside_of_a_graph_are_refused_with_their_line(name: str) -> None:
    with fake_world(2):
        model = _Writes({**_WRITES, **_STATISTICS}[name])
        with pytest.raises(BackendCompilerFailed) as caught:
            compile_eagerly(model)(torch.ones(2, 6))
    error = caught.value.inner_exception
    assert isinstance(error, UnsupportedModelError)
    assert "changes a gathered parameter in place" in error.what
    assert (error.where or "").startswith('File "')
    assert name not in ("data", "view") or f'"{name}": lambda p: ' in (error.where or "")
    assert "between steps" in (error.instead or "")


@pytest.mark.parametrize("write", _ASSIGNMENTS.values(), ids=_ASSIGNMENTS)
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "sharded"])
def test_assignments_that_break_the_graph_are_refused(
    write: Callable[[torch.Tensor], object],
    is_plain: bool,  # noqa: FBT001
) -> None:
    with fake_world(2):
        model = _Writes(write)
        if not is_plain:
            fully_shard(model)
        # In the assignment itself, or in the graph that Dynamo makes of the function that does it.
        with pytest.raises((UnsupportedModelError, BackendCompilerFailed), match="gathered parameter in place"):
            compile_eagerly(model)(torch.ones(2, 6))


def _after_a_break(parameter: torch.Tensor) -> None:
    torch._dynamo.graph_break()
    parameter.mul_(0.5)


def test_a_write_into_what_was_read_before_a_graph_break_is_refused() -> None:
    with fake_world(2):
        model = _Writes(_after_a_break)
        fully_shard(model)
        with pytest.raises(BackendCompilerFailed, match="changes a gathered parameter in place"):
            compile_eagerly(model)(torch.ones(2, 6))


class _Reads(_Writes):
    """Uses of a parameter that write elsewhere."""

    def __init__(self) -> None:
        super().__init__(self.read)

    def read(self, p: torch.Tensor) -> None:
        p.clone().mul_(0.5)
        torch.mul(p, 0.5, out=torch.empty(6))
        torch._foreach_mul_([p * 2], 0.5)
        F.batch_norm(torch.randn(4, 6), torch.zeros(6), torch.ones(6), weight=p, training=True)
        F.batch_norm(torch.randn(4, 6), p, torch.ones(6), training=False)


def test_reads_are_not_taken_for_writes() -> None:
    with fake_world(2):
        model = _Reads()
        fully_shard(model)
        compile_eagerly(model)(torch.ones(2, 6)).sum().backward()


_OPERATORS = ("and", "or", "xor", "lshift", "rshift", "add", "sub", "mul", "floordiv", "mod", "pow")


class _Packed(nn.Module):
    """Computes with an integer parameter, which FSDP2 splits like another one."""

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        packed = torch.arange(1, 25, dtype=torch.uint8).view(4, 6)
        self.packed, self.layer = nn.Parameter(packed, requires_grad=False), nn.Linear(6, 6)
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ self.compute(self.packed).float().t()


def _combine(packed: torch.Tensor) -> torch.Tensor:
    names = [f"{name}_" if name in ("and", "or") else name for name in _OPERATORS]
    return sum(
        (getattr(operator, name)(packed, 2) for name in names), ~packed + (2 & packed) + torch.bitwise_or(2, packed)
    )


def test_operators_of_integer_parameters_are_not_taken_for_their_forms_in_place() -> None:
    with fake_world(2):
        model = _Packed(_combine)
        torch_fully_shard(model)
        compile_eagerly(model)(torch.ones(2, 6)).sum().backward()


@pytest.mark.parametrize("name", [f"i{name}" for name in _OPERATORS])
def test_operators_in_place_are_refused(name: str) -> None:
    def method(packed: torch.Tensor) -> torch.Tensor:
        return getattr(packed, f"__{name}__")(2)

    for write in (lambda packed: getattr(operator, name)(packed, 2), method, lambda packed: method(packed.data)):
        with fake_world(2):
            torch.compiler.reset()
            model = _Packed(write)
            torch_fully_shard(model)
            with pytest.raises(BackendCompilerFailed, match="changes a gathered parameter in place"):
                compile_eagerly(model)(torch.ones(2, 6))


class _Embeds(nn.Module):
    def __init__(self, make: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.table, self.layer = make(4, 6, max_norm=1.0), nn.Linear(6, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(ids))


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_renormalize_their_weight_are_refused(make: Callable[..., nn.Module]) -> None:
    ids = torch.tensor([[0, 1]])
    with fake_world(2):
        model = _Embeds(make)
        fully_shard(model)
        with pytest.raises(
            BackendCompilerFailed, match=r"changes a gathered parameter in place[\s\S]*self.table\(ids\)"
        ):
            compile_eagerly(model)(ids)
        ignored: Any = _Embeds(make)
        fully_shard(ignored, ignored_params=[ignored.table])
        compile_eagerly(ignored)(ids)
        assert ignored.table.weight[:2].norm(dim=1).max() < 1.001
