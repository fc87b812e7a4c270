"""Two plain models that share a part, each compiled: the part is a unit of its own, and all train as in one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from fsdp_compile.capture.shared_parts import shared_parts
from torch import nn

from fsdp_compile import ConfigError, units
from tests import long
from tests.beside import close, compile_eagerly, loss_of
from tests.fake_world import fake_world
from tests.ranks import run_ranks


class _Headed(nn.Module):
    """A trunk, blocks that may be shared too, and a head of its own."""

    def __init__(self, trunk: nn.Module, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.trunk, self.blocks, self.own = trunk, blocks, nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.trunk(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.own(x)


def _pair() -> nn.ModuleList:
    """An actor and a critic."""
    trunk = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    common = nn.Linear(6, 6)
    others = [nn.ModuleList([nn.Linear(6, 6), common]), nn.ModuleList([common, nn.Linear(6, 6)])]
    return nn.ModuleList([_Headed(trunk, blocks) for blocks in others])


def test_the_outermost_modules_that_two_models_share() -> None:
    actor, critic = _pair()
    assert shared_parts(actor, [actor, critic]) == [actor.trunk, actor.get_submodule("blocks.1")]
    # One holds it, the other is in it.
    assert shared_parts(actor, [nn.Sequential(actor), actor.get_submodule("trunk")]) == []
    assert shared_parts(actor, []) == []


def _train(form: str) -> None:
    torch.manual_seed(0)
    both = _pair()
    reference = copy.deepcopy(both)
    if form == "in place":
        for part in both:
            part.compile(backend="fsdp", options={"lower": "eager"})
    called = list(both) if form == "in place" else [compile_eagerly(part) for part in both]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (both, reference)]
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(2):
        batch = torch.randn(2 * world, 6, generator=torch.Generator().manual_seed(step))
        mine = [loss_of(part(batch.chunk(world)[rank])) for part in called]
        theirs = [loss_of(part(batch)) for part in reference]
        for losses in (mine, theirs):
            if step == 1:
                losses[0].backward()
                losses[1].backward()
            else:
                (losses[0] + 2 * losses[1]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, p), q in zip(both.named_parameters(), reference.parameters(), strict=True):
            close(p.full_tensor(), q, name)  # type: ignore[attr-defined]
    trunk = both[0].get_submodule("trunk")
    assert any(unit.name == "trunk" for unit in units(both[0]))
    assert [p for u in units(both[1]) for p in u.params if p.parameter is next(trunk.parameters())]


@long.parametrize("form", ["in place", "wrapped"], always=["in place"])
def test_models_that_share_a_trunk_train_as_in_one_process(form: str) -> None:
    run_ranks(_train, form)


def test_a_model_whose_part_is_sharded_with_another_is_told_what_to_do() -> None:
    with fake_world(2):
        actor, critic = _pair()
        compile_eagerly(actor)(torch.ones(2, 6))
        with pytest.raises(ConfigError, match="compile both models before the first call of either"):
            compile_eagerly(critic)(torch.ones(2, 6))
