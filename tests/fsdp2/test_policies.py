"""Every field of FSDP2's policies that this torch has, in compiled steps: the bits of uncompiled ones.

`FSDP_COMPILE_LONG=1` runs them for each choice of units, with frozen parameters of another dtype, and with replicas.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import fsdp_compile
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.hardware import hardware
from tests import long
from tests.fsdp2.mlp import WIDTH, only_hooks, pair_of
from tests.models.round_sizes import Stack, explained
from tests.ranks import on_ranks
from tests.two_sides import WithFsdp2, mesh_of, sgd, taken_over

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
    """Its first product is one of two dtypes where parameters are in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.unused = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x.float() * self.scale).to(self.linear.weight.dtype)
        return torch.tanh(self.linear(x))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _frozen_in_bf16() -> _Model:
    """Parameters of two dtypes in a unit: FSDP2 wants one for those that are trained."""
    model = _Model()
    layer: Any
    for layer in model.layers:
        layer.scale = nn.Parameter(layer.scale.detach().to(BF16), requires_grad=False)
    return model


def _each(model: Any) -> list[nn.Module]:
    return [*model.layers, model]


UNITS: dict[str, tuple[Any, Any]] = {
    "each layer": (_Model, _each),
    "one unit": (_Model, lambda model: [model]),
    "two dtypes": (_frozen_in_bf16, _each),
}


def _pair(
    policy: str, mesh: tuple[int, ...] = (2,), ours: Any = fully_shard, make: Any = _Model, units: Any = _each
) -> WithFsdp2:
    settings = {"mesh": mesh_of(mesh), "mp_policy": POLICIES[policy]}

    def shard(model: Any, fully_shard: Any = fully_shard) -> None:
        for module in units(model):
            fully_shard(module, **settings)

    return pair_of(make, sharded=shard, ours=lambda model: shard(model, ours))


@long.parametrize("units", UNITS, always=["each layer"])
@long.parametrize("mesh", [(2,), (2, 2)], always=[(2,)])
@long.parametrize("policy", POLICIES, always=["bf16, reduced in it"])
@on_ranks(world_size=lambda mesh, **_: 2 * len(mesh))
def test_numbers_are_those_of_fsdp2(policy: str, mesh: tuple[int, ...], units: str) -> None:
    for ours in (fully_shard, fsdp_compile.fully_shard):
        torch._dynamo.reset()
        pair = _pair(policy, mesh, ours, *UNITS[units])
        call, model = pair.call, pair.model
        pair.train()
        # Of compiled and uncompiled microbatches the gradients of one wait for the reduction of the other.
        for calls in ((call, call), (model, model), (call, model), (model, call), (call, call, call)):
            pair.train(*calls, steps=1)
        units_that_read = [unit for unit in taken_over(model).units if unit.groups]
        assert all(unit.compiled_regions and not unit.only_hooks for unit in units_that_read)


@on_ranks()
def test_what_is_sent() -> None:
    reduced = vectors = torch.float32 if HAS_OVERRIDES else BF16
    pair = _pair("bf16, vectors kept" if HAS_OVERRIDES else "bf16")
    pair.train(steps=1)
    specs = {param.name: param.spec for group in taken_over(pair.model).groups for param in group.params}
    assert {
        name.removeprefix("layers.0."): (spec.param_dtype, spec.reduce_dtype)
        for name, spec in specs.items()
        if name.startswith("layers.0.")
    } == {"scale": (vectors, reduced), "unused": (vectors, reduced), "linear.weight": (BF16, reduced)}


def test_plans_count_the_bytes_that_this_torch_sends() -> None:
    plan = explained(Stack, 4, hardware(link=50.0), mp_policy=POLICIES["bf16"])
    forward, backward = plan.graphs
    (gather,) = forward.sent
    (reduce,) = (each for each in backward.sent if each.kind is Kind.REDUCE)
    assert gather.dtype == "bfloat16"
    assert reduce.dtype == ("float32" if HAS_OVERRIDES else "bfloat16")
    assert reduce.size_bytes == (2 if HAS_OVERRIDES else 1) * gather.size_bytes


def _of_another_dtype() -> _Model:
    model: Any = _Model()
    model.layers[0].linear.weight.grad_dtype = BF16
    return model


@pytest.mark.skipif(not HAS_OVERRIDES, reason="since torch 2.15")
@long.parametrize("mesh", [(2,), (2, 2)], always=[(2,)])
@pytest.mark.parametrize("policy", ["none", "bf16, vectors kept"])
@on_ranks(world_size=lambda mesh, **_: 2 * len(mesh))
def test_gradients_of_a_dtype_of_their_own(policy: str, mesh: tuple[int, ...]) -> None:
    """FSDP2's hooks gather a unit with such a parameter, and graphs the others."""
    pair = _pair(policy, mesh, make=_of_another_dtype)
    pair.optimize(sgd)  # AdamW takes no gradients of another dtype
    pair.train(steps=1)
    pair.accumulate(pair.call, pair.call)
    assert {pair.model.layers[i].linear.weight.grad.dtype for i in range(2)} == {BF16, torch.float32}
    assert [bool(why) for why in only_hooks(pair.model)] == [False, True, False]


@pytest.mark.skipif(not hasattr(FSDPModule, "finalize_backward"), reason="since torch 2.15")
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("gathered_before", [False, True])
@on_ranks()
def test_backwards_that_the_caller_ends(*, async_op: bool, gathered_before: bool) -> None:
    """After both microbatches of a step."""

    def end(model: Any) -> None:
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=async_op)
        if async_op:
            handle.wait()
        model.set_requires_gradient_sync(False)

    pair = _pair("bf16")
    pair.change(lambda model: model.set_manual_backward_finalization(True))
    pair.change(lambda model: model.set_requires_gradient_sync(False))
    if gathered_before:
        with torch.no_grad():
            pair.change(lambda model: model(torch.ones(1, WIDTH)))
    for _ in range(2):
        pair.backward()
        pair.backward()
        pair.change(end)
        assert any(p.grad is not None for p in pair.reference.parameters())
        pair.compare_gradients()
        pair.zero_grad()
