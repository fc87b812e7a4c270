"""`module.compile(backend="fsdp")`: modules of torch's own, parts of a model, and the first compile of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fsdp_compile import ConfigError
from tests import long
from tests.models.kinds import WIDTH, Stack
from tests.ranks import run_ranks
from tests.two_sides import Run, WithOneProcess

IN_PLACE = {"backend": "fsdp", "options": {"lower": "eager"}}


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH // 4, 2, WIDTH, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (4, WIDTH // 4)), layer, nn.Flatten(1))


class _Head(nn.Module):
    """Has a part that another one has, too."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.trunk(x))


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        trunk = nn.Linear(WIDTH, WIDTH)
        self.a, self.b = _Head(trunk), _Head(trunk)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x)


def _train(make: Callable[[], nn.Module], how: Run, parts: Callable[[nn.Module], list[nn.Module]]) -> None:
    pair = WithOneProcess(make, how, shape=WIDTH)
    for part in parts(pair.model):
        part.compile(**IN_PLACE)
    pair.train(steps=3)


def _all_of_it(model: nn.Module) -> list[nn.Module]:
    return [model]


def _each_part(model: nn.Module) -> list[nn.Module]:
    assert isinstance(model, Stack)
    return [*model.blocks, model.head]


def _heads(model: nn.Module) -> list[nn.Module]:
    assert isinstance(model, _TwoHeads)
    return [model.a, model.b]


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.core
@long.parametrize(
    ("make", "parts"),
    [(_linear, _all_of_it), (_sequential, _all_of_it), (_encoder, _all_of_it), (Stack, _each_part)],
    always=[(_sequential, _all_of_it)],
)
def test_it_trains_as_one_process(make: Callable[[], nn.Module], parts: Callable[[nn.Module], list[nn.Module]]) -> None:
    run_ranks(_train, make, Run.UNSHARDED, parts)


def _refused(make: Callable[[], nn.Module]) -> str:
    """Compiles all but the last child of a model."""
    model = make()
    for part in list(model.children())[:-1]:
        part.compile(**IN_PLACE)
    with pytest.raises(ConfigError) as caught:
        model(torch.ones(2, WIDTH))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters()), "something was sharded"
    return str(caught.value)


@pytest.mark.parametrize("make", [_sequential, _TwoHeads])
def test_parts_whose_rest_is_plain_are_refused_before_anything_is_sharded(make: Callable[[], nn.Module]) -> None:
    for message in run_ranks(_refused, make):
        assert "only a part of a model is compiled" in message
        assert "fully_shard(model) first, or compile the model" in message


def _nothing(_model: nn.Module) -> list[nn.Module]:
    return []


@long.parametrize(
    ("how", "parts"),
    [(Run.PLAIN, _nothing), (Run.EAGER, _heads)],
    always=[(Run.EAGER, _heads)],
    ids=["whole", "sharded"],
)
def test_what_the_refusal_of_a_shared_trunk_advises(how: Run, parts: Callable[[nn.Module], list[nn.Module]]) -> None:
    run_ranks(_train, _TwoHeads, how, parts)


SCRIPT = textwrap.dedent(
    """
    import torch, torch.distributed as dist
    from torch import nn
    layer = nn.Linear(4, 4)
    layer.compile(backend="fsdp", options={"lower": "eager"})  # imports the package
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layer(torch.ones(2, 4)).sum().backward()
    print(type(layer.weight).__name__)
    dist.destroy_process_group()
    """
)


@pytest.mark.long
def test_the_first_compile_of_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=dict(os.environ), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "DTensor"
