"""`register_comm_hook` in compiled steps: torch's own hooks as nodes, and any other function of the user's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.comm_hook import register_comm_hook
from tests.fsdp2.mlp import pair_of, shard
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import BITS, Within


class _Count:
    calls = 0


def _average(state: _Count, gradient: torch.Tensor, output: torch.Tensor) -> None:
    state.calls += 1
    dist.reduce_scatter_tensor(output, gradient)
    output /= dist.get_world_size()


LOW = Within((0.05, 0.02), (0.05, 0.02), (0.05, 0.02))


@pytest.mark.parametrize(("is_own", "micro_batches"), [(True, 1), (True, 2), (False, 1), (False, 2)])
@on_ranks()
def test_compiled(*, is_own: bool, micro_batches: int) -> None:
    """A hook that averages, and torch's for bfloat16, which is as FSDP2's `reduce_dtype`."""
    policy = MixedPrecisionPolicy() if is_own else MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    pair, count = pair_of(fullgraph=True, ours=shard, mp_policy=policy), _Count()
    if is_own:
        register_comm_hook(pair.model, _average, count)
    else:
        register_comm_hook(pair.call, default_hooks.bf16_compress_hook)
    # FSDP2 adds microbatches up in bfloat16, a hook compresses their sum.
    pair.train(*[pair.call] * micro_batches, within=LOW if micro_batches > 1 and not is_own else BITS)
    assert count.calls == (6 if is_own else 0)  # units times steps


def _after_a_step() -> int:
    """One that is registered after compiled steps counts from the next one on."""
    pair, count = pair_of(fullgraph=True), _Count()
    pair.train(steps=1)
    register_comm_hook(pair.model, _average, count)
    pair.train(steps=1)
    with pytest.raises(ConfigError, match="has a communication hook already"):
        register_comm_hook(pair.model, _average, count)
    return count.calls


def test_after_a_step() -> None:
    assert run_ranks(_after_a_step) == [3, 3]
