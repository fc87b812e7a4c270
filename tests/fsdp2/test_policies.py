"""Every field of FSDP2's policies that this torch has, in compiled steps: the bits of uncompiled ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import fsdp_compile
from fsdp_compile.fsdp2.take_over import model_of
from tests import long
from tests.fsdp2.mlp import WIDTH, batch, compiled, local, only_hooks, train, unequal
from tests.ranks import run_ranks

pytestmark = pytest.mark.core
BF16 = torch.bfloat16
POLICIES = {
    "none": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=BF16),
    "bf16, reduced in it": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),
    "bf16, reduced in fp32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    "reduced in bf16": MixedPrecisionPolicy(reduce_dtype=BF16),
}
HAS_OVERRIDES = "param_dtype_override_fn" in {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}
"""Since torch 2.15, whose FSDP2 also heeds `Tensor.grad_dtype`."""


def _keeps_vectors(parameter: nn.Parameter) -> torch.dtype | None:
    return parameter.dtype if parameter.dim() == 1 else None


if HAS_OVERRIDES:
    overrides: dict[str, Any] = {"param_dtype_override_fn": _keeps_vectors}
    POLICIES |= {f"{name}, vectors kept": dataclasses.replace(POLICIES[name], **overrides) for name in list(POLICIES)}


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear((x * self.scale).to(self.linear.weight.dtype)))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _sharded(
    shard: Callable[..., Any], mesh: tuple[int, ...], prepare: Callable[[Any], object] = id, **rest: Any
) -> Any:
    torch.manual_seed(0)
    model = _Model()
    prepare(model)
    mesh_of = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
    for module in (*model.layers, model):
        shard(module, mesh=mesh_of, **rest)
    return model


def _no_sync(model: Any, number: int) -> None:
    model.set_requires_gradient_sync(number == 1)


def _alternately(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Both orders of compiled and uncompiled microbatches: the gradients of one wait for the reduction of the other."""
    ours = compiled(model)
    calls = [ours, ours, model, model, ours, model, model, ours]

    def call(x: torch.Tensor) -> torch.Tensor:
        return calls.pop(0)(x)

    return call


def _differences(name: str, mesh: tuple[int, ...]) -> list[list[int]]:
    policy = POLICIES[name]
    found = []
    for micro_batches, shard, call in (
        (1, fully_shard, compiled),
        (2, fully_shard, compiled),
        (2, fsdp_compile.fully_shard, compiled),
        (2, fully_shard, _alternately),
    ):
        torch._dynamo.reset()
        plain, model = _sharded(fully_shard, mesh, mp_policy=policy), _sharded(shard, mesh, mp_policy=policy)
        steps = 4 if call is _alternately else 2
        before: Any = _no_sync if micro_batches > 1 else None
        expected = train(plain, plain, steps=steps, micro_batches=micro_batches, before=before)
        found.append(
            unequal(expected, train(model, call(model), steps=steps, micro_batches=micro_batches, before=before))
        )
        assert not any(only_hooks(model))
    return found


@long.parametrize("mesh", [(2,), (2, 2)], always=[(2,)])
@pytest.mark.parametrize("name", POLICIES)
def test_numbers_are_those_of_fsdp2(name: str, mesh: tuple[int, ...]) -> None:
    ranks = 2 * len(mesh)
    assert run_ranks(_differences, name, mesh, world_size=ranks) == [[[]] * 4] * ranks


def _dtypes(name: str) -> list[tuple[str, torch.dtype, torch.dtype]]:
    model = _sharded(fully_shard, (2,), mp_policy=POLICIES[name])
    train(model, compiled(model), steps=1)
    taken = model_of(model)
    assert taken is not None
    params = {param.name: param.spec for group in taken.groups for param in group.params}
    return [(name, spec.param_dtype, spec.reduce_dtype) for name, spec in params.items() if name.startswith("layers.0")]


def test_what_is_sent() -> None:
    reduced = torch.float32 if HAS_OVERRIDES else BF16
    vectors = torch.float32 if HAS_OVERRIDES else BF16
    name = "bf16, vectors kept" if HAS_OVERRIDES else "bf16"
    expected = [
        ("layers.0.scale", vectors, reduced),
        ("layers.0.unused", vectors, reduced),
        ("layers.0.linear.weight", BF16, reduced),
    ]
    found = run_ranks(_dtypes, name)
    assert [sorted(each) for each in found] == [sorted(expected)] * 2


if HAS_OVERRIDES:

    def _own_dtypes(name: str) -> tuple[list[int], set[torch.dtype], list[bool]]:
        def prepare(model: Any) -> None:
            model.layers[0].linear.weight.grad_dtype = BF16

        policy = POLICIES[name]
        ends = []
        for is_compiled in (False, True):
            model = _sharded(fully_shard, (2,), prepare, mp_policy=policy)
            call = compiled(model) if is_compiled else model
            for number in range(2):
                _no_sync(model, number)
                call(batch(number)).square().sum().backward()
            ends.append([local(p.grad) for p in model.parameters()])
        dtypes = {model.layers[i].linear.weight.grad.dtype for i in range(2)}
        return unequal(*ends), dtypes, [bool(why) for why in only_hooks(model)]

    @pytest.mark.parametrize("name", ["none", "bf16"])
    def test_gradients_of_a_dtype_of_their_own(name: str) -> None:
        """FSDP2's hooks gather a unit with such a parameter, and graphs the others."""
        expected = ([], {BF16, torch.float32}, [False, True, False])
        assert run_ranks(_own_dtypes, name) == [expected] * 2


if hasattr(FSDPModule, "finalize_backward"):

    class _Finalizes:
        """A model whose caller ends backwards: after both microbatches of a step."""

        def __init__(self, model: Any) -> None:
            self.model = model
            model.set_manual_backward_finalization(True)

        def end(self, *, async_op: bool) -> None:
            self.model.set_requires_gradient_sync(True)
            handle = self.model.finalize_backward(async_op=async_op)
            if async_op:
                handle.wait()
            self.model.set_requires_gradient_sync(False)

    def _finalized(*, async_op: bool, gathered_before: bool) -> list[int]:
        ends = []
        for is_compiled in (False, True):
            model = _sharded(fully_shard, (2,), mp_policy=POLICIES["bf16"])
            call = compiled(model) if is_compiled else model
            if gathered_before:
                with torch.no_grad():
                    model(torch.ones(1, WIDTH))
            caller, seen = _Finalizes(model), []
            model.set_requires_gradient_sync(False)
            for step in range(2):
                for number in range(2):
                    call(batch(2 * step + number)).square().sum().backward()
                caller.end(async_op=async_op)
                seen += [local(p.grad) for p in model.parameters()]
                model.zero_grad()
            ends.append(seen)
        assert any(grad is not None for grad in ends[0])
        return unequal(*ends)

    @pytest.mark.parametrize("async_op", [False, True])
    @pytest.mark.parametrize("gathered_before", [False, True])
    def test_backwards_that_the_caller_ends(*, async_op: bool, gathered_before: bool) -> None:
        assert run_ranks(_finalized, async_op=async_op, gathered_before=gathered_before) == [[]] * 2
