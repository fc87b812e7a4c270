"""Experts of one grouped matmul, sharded within each expert: equal to one process, and FSDP2's bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import fsdp_compile
from tests import long
from tests.models.grouped_experts import MixtureOfExperts, deepseek, mixtral
from tests.models.tensor_parallel import VOCABULARY, Decoder
from tests.ranks import run_ranks

RANKS, STEPS = 4, 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_GROUPED = ", grouped"
"""End of the name of a model in bfloat16, in which torch has grouped matmuls that it can trace."""
MODELS = {"mixtral": mixtral, "deepseek": deepseek}


def _within_experts(parameter: torch.nn.Parameter) -> Shard:
    """There are as few experts as ranks, or fewer: each rank has a part of every one."""
    return Shard(1) if parameter.ndim == 3 else Shard(0)


def _make(name: str, *, one_sided: bool) -> Decoder:
    """A model; `one_sided` routes all tokens to two experts, so that the others have none."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name]()
    for layer in model.layers if one_sided else ():
        part = layer.feed_forward
        if isinstance(part, MixtureOfExperts):
            with torch.no_grad():
                part.router.weight.zero_()
    return model


def _trained(name: str, fully_shard: Any = None, lower: str | None = None, *, one_sided: bool) -> list[torch.Tensor]:
    """Losses, whole parameters and gradients; of one process without `fully_shard`."""
    model = _make(name.removesuffix(_GROUPED), one_sided=one_sided)
    policy = BF16 if name.endswith(_GROUPED) else MixedPrecisionPolicy()
    if fully_shard is not None:
        for module in (*model.layers, model):
            fully_shard(module, mp_policy=policy, shard_placement_fn=_within_experts)
    call = model if lower is None else torch.compile(model, backend="fsdp", options={"lower": lower})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (RANKS, 2, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = call(tokens.flatten(0, 1) if fully_shard is None else tokens[dist.get_rank()])
        loss.backward()
        optimizer.step()
        found.append(loss.detach().clone())
        if fully_shard is not None:
            dist.all_reduce(found[-1])
            found[-1] /= RANKS
    values = [v for p in model.parameters() for v in (p.detach(), p.grad)]
    return found + [v.full_tensor() if isinstance(v, DTensor) else v for v in values if v is not None]


def _compare(name: str, lower: str | None, *, one_sided: bool) -> list[int]:
    """The places of what is not FSDP2's, bit for bit."""
    ours = _trained(name, fsdp_compile.fully_shard, lower, one_sided=one_sided)
    rtol, atol = (5e-2, 2e-2) if name.endswith(_GROUPED) else (1e-4, 1e-6)
    for a, b in zip(ours, _trained(name, one_sided=one_sided), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
    theirs = _trained(name, torch.distributed.fsdp.fully_shard, one_sided=one_sided)
    return [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)]


CASES = [(f"{name}{end}", one_sided) for name in MODELS for end in ("", _GROUPED) for one_sided in (False, True)]


@long.parametrize(("name", "one_sided"), CASES, always=[("mixtral, grouped", False)])
def test_compiled(name: str, *, one_sided: bool) -> None:
    assert run_ranks(_compare, name, "eager", one_sided=one_sided, world_size=RANKS) == [[]] * RANKS
