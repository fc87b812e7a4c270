"""Experts of one grouped matmul, sharded within each expert: equal to one process, and FSDP2's bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import fsdp_compile
from tests import long
from tests.models.grouped_experts import VOCABULARY, MixtureOfExperts, deepseek, mixtral
from tests.ranks import on_ranks
from tests.two_sides import MIXED, close, compile_eagerly, made, mean_over_ranks, sgd, whole

RANKS, STEPS = 4, 2
_GROUPED = ", grouped"
"""End of the name of a model in bfloat16, in which torch has grouped matmuls that it can trace."""
MODELS = {"mixtral": mixtral, "deepseek": deepseek}


def _within_experts(parameter: torch.nn.Parameter) -> Shard:
    """There are as few experts as ranks, or fewer: each rank has a part of every one."""
    return Shard(1) if parameter.ndim == 3 else Shard(0)


def _trained(name: str, fully_shard: Any = None, lower: str | None = None, *, one_sided: bool) -> list[torch.Tensor]:
    """Losses, whole parameters and gradients; of one process without `fully_shard`.

    `one_sided` routes all tokens to two experts, so that the others have none.
    """
    torch._dynamo.reset()
    model = made(MODELS[name.removesuffix(_GROUPED)])
    for layer in model.layers if one_sided else ():
        if isinstance(layer.feed_forward, MixtureOfExperts):
            with torch.no_grad():
                layer.feed_forward.router.weight.zero_()
    policy = MIXED if name.endswith(_GROUPED) else MixedPrecisionPolicy()
    if fully_shard is not None:
        for module in (*model.layers, model):
            fully_shard(module, mp_policy=policy, shard_placement_fn=_within_experts)
    call = model if lower is None else compile_eagerly(model, lower=lower)
    optimizer = sgd(model.parameters())
    found = []
    for step in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (RANKS, 2, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = call(tokens.flatten(0, 1) if fully_shard is None else tokens[dist.get_rank()])
        loss.backward()
        optimizer.step()
        found.append(loss.detach() if fully_shard is None else mean_over_ranks(loss))
    return found + [whole(v) for p in model.parameters() for v in (p.detach(), p.grad) if v is not None]


CASES = [(f"{name}{end}", one_sided) for name in MODELS for end in ("", _GROUPED) for one_sided in (False, True)]


@long.parametrize(("name", "one_sided"), CASES, always=[("mixtral, grouped", False)])
@on_ranks(world_size=RANKS)
def test_compiled(name: str, *, one_sided: bool) -> None:
    ours = _trained(name, fsdp_compile.fully_shard, "eager", one_sided=one_sided)
    within = (5e-2, 2e-2) if name.endswith(_GROUPED) else (1e-4, 1e-6)
    for a, b in zip(ours, _trained(name, one_sided=one_sided), strict=True):
        close(a, b, "in one process", within)
    theirs = _trained(name, torch.distributed.fsdp.fully_shard, one_sided=one_sided)
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))
