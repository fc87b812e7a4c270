"""`module.compile(backend="fsdp")`: models, parts of a model, and the first compile of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import ConfigError
from tests import long
from tests.beside import Beside, Run
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Stack
from tests.ranks import run_ranks

IN_PLACE = {"backend": "fsdp", "options": {"lower": "eager"}}


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


def _sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


def _train(make: Callable[[], nn.Module], how: Run, parts: Callable[[nn.Module], list[nn.Module]]) -> None:
    pair = Beside(make, how)
    for part in parts(pair.model):
        part.compile(**IN_PLACE)
    pair.optimize(_sgd)
    for _ in range(3):
        pair.step(width=WIDTH)


def _all_of_it(model: nn.Module) -> list[nn.Module]:
    return [model]


def _heads(model: nn.Module) -> list[nn.Module]:
    assert isinstance(model, _TwoHeads)
    return [model.a, model.b]


@pytest.mark.core
@long.parametrize("make", [Stack, _TwoHeads], always=[Stack])
def test_it_trains_as_one_process(make: Callable[[], nn.Module]) -> None:
    run_ranks(_train, make, Run.UNSHARDED, _all_of_it)


def _without_a_word() -> list[type]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model.compile(**IN_PLACE)
    model(torch.ones(2, WIDTH)).sum().backward()
    return [type(parameter) for parameter in model.parameters()]


def test_a_module_of_a_class_of_torch_stays_plain_since_torch_compiles_nothing_of_it() -> None:
    for kinds in run_ranks(_without_a_word):
        assert set(kinds) == {nn.Parameter}


def test_casts_that_the_begun_call_has_missed_are_refused() -> None:
    with fake_world(2):
        model = Stack()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model.compile(backend="fsdp", options={"lower": "eager", "mp_policy": policy})
        with pytest.raises(ConfigError, match="its call had begun before it was sharded"):
            model(torch.ones(2, WIDTH))


def _refused() -> str:
    """Compiles all but the last child of a model."""
    model = _TwoHeads()
    model.a.compile(**IN_PLACE)
    with pytest.raises(ConfigError) as caught:
        model(torch.ones(2, WIDTH))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters()), "something was sharded"
    return str(caught.value)


def test_parts_whose_rest_is_plain_are_refused_before_anything_is_sharded() -> None:
    for message in run_ranks(_refused):
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
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x)
    layer = Layer(4, 4)
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
