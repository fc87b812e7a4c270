"""Settings of this package's `fully_shard` for which FSDP2 has no place, in compiled steps."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.fsdp2.mlp import sharded
from tests.ranks import run_ranks
from tests.two_sides import compile_eagerly

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _set(model: Any, **settings: Any) -> None:
    for module in (*model.layers, model):
        module._get_fsdp_state()._fsdp_compile_settings = types.SimpleNamespace(**settings)


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
