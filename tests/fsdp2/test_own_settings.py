"""Settings of this package's `fully_shard` for which FSDP2 has no place, in compiled steps."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_compile.backend import fsdp
from fsdp_compile.fsdp2.take_over import model_of
from fsdp_compile.layout.spec import Reshard
from tests.fsdp2.mlp import pair_of, sharded
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import compile_eagerly

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _set(model: Any, **settings: Any) -> None:
    for module in (*model.layers, model):
        module._get_fsdp_state()._fsdp_compile_settings = types.SimpleNamespace(**settings)


def _specs(model: nn.Module) -> list[Any]:
    taken = model_of(model)
    assert taken is not None
    return [param.spec for group in taken.groups for param in group.params]


def _trained(settings: dict[str, Any]) -> None:
    pair = pair_of(fullgraph=True)
    _set(pair.model, **settings)
    pair.train()
    specs = _specs(pair.model)
    if "auto_reshard" in settings:
        assert {spec.reshard for spec in specs} == {Reshard.AUTO, Reshard.AFTER_BACKWARD}  # the root is kept
    if "separate_reduce_group" in settings:
        assert {spec.reduce_group for spec in specs} == {"fsdp.reduce.0"}


@pytest.mark.parametrize("name", ["auto_reshard", "separate_reduce_group"])
def test_same_numbers(name: str) -> None:
    run_ranks(_trained, {name: True})


@on_ranks()
def test_low_bit_gathers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 4))
    expected = model(torch.ones(2, 128)).detach()
    fully_shard(model)
    model._get_fsdp_state()._fsdp_compile_settings = types.SimpleNamespace(gather_dtype=torch.int8)  # type: ignore[operator]

    def run(x: torch.Tensor) -> Any:
        return model[2](model[1](model[0](x)))

    assert torch.allclose(model(torch.ones(2, 128)), expected, atol=1e-5)  # uncompiled: FSDP2's
    found = torch.compile(run, backend=fsdp, options={"lower": "eager"}, fullgraph=True)(torch.ones(2, 128))
    error, formats = float((found - expected).abs().max().detach()), {spec.gather_format for spec in _specs(model)}
    assert 1e-5 < error < 1e-2
    assert formats == {"int8", ""}


def _low_precision() -> list[str]:
    model, plain = sharded(mp_policy=BF16), sharded(mp_policy=BF16)
    _set(model, keep_low_precision_grads=True)
    for call in (compile_eagerly(model, fullgraph=True, reduce_layout="fsdp2"), plain):
        for _ in range(2):
            call(torch.ones(3, 16)).square().sum().backward()
    both: Any = zip(model.parameters(), plain.parameters(), strict=True)
    found = [(p.grad, q.grad) for p, q in both if q.grad is not None]
    assert len(found) == 6
    for mine, theirs in found:
        torch.testing.assert_close(mine.to_local().float(), theirs.to_local(), rtol=0.02, atol=1e-3)
    return sorted({str(mine.dtype) for mine, _ in found})


def test_low_precision_gradients() -> None:
    assert run_ranks(_low_precision) == [["torch.bfloat16"]] * 2


def _in_eval() -> list[bool]:
    model, full, low = sharded(mp_policy=BF16), sharded(), sharded(mp_policy=BF16)
    _set(model, full_precision_in_eval=True)
    call, x = compile_eagerly(model, fullgraph=True, reduce_layout="fsdp2"), torch.randn(3, 16)
    found = []
    for other in (low, full, low):
        model.train(other is low)
        with torch.no_grad():
            found.append(torch.equal(call(x), other(x)))
    model.eval()
    call(x).sum().backward()
    full(x).sum().backward()
    both: Any = zip(model.parameters(), full.parameters(), strict=True)
    return [*found, *(torch.allclose(p.grad.to_local(), q.grad.to_local()) for p, q in both if q.grad is not None)]


def test_full_precision_in_eval() -> None:
    assert run_ranks(_in_eval) == [[True] * 9] * 2
