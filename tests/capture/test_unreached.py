"""Models whose forward Dynamo leaves to Python are sharded as a whole, and train as in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_compile import ConfigError, fully_shard
from tests import long
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Stack
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess, compile_eagerly, compile_in_place


@pytest.mark.long
@pytest.mark.parametrize("how", [Run.PLAIN, Run.EAGER], ids=["module", "module.compile"])
@on_ranks()
def test_models_of_one_class_past_the_recompile_limit_train_as_in_one_process(how: Run) -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(5):
            pair = WithOneProcess(Stack, how, shape=WIDTH)
            if how is Run.EAGER:
                compile_in_place(pair.model)
            pair.train(steps=3)


@on_ranks()
def test_a_sharded_model_past_the_recompile_limit_trains_on() -> None:
    """A sharded model goes on in Python, to the numbers of one process."""
    pair = WithOneProcess(Stack, Run.PLAIN, shape=WIDTH)
    with torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False):
        pair.train(steps=1)
        pair.dtype = torch.float64
        pair.change(lambda model: model.double())
        pair.train()


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class _PartsAlone(nn.Module):
    """Dynamo leaves its forward to Python, and compiles its parts one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Scale(), _Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            torch._dynamo.graph_break()
            return self.second(self.first(x))
        finally:
            pass


def test_ignored_parameters_take_gradients() -> None:
    """They train on each rank alone, as asked for."""
    with fake_world(2):
        model = _PartsAlone()
        fully_shard(model, ignored_params=[model.second])
        compile_eagerly(lambda x: model(x))(torch.ones(2, WIDTH)).sum().backward()  # noqa: PLW0108
        assert model.second.weight.grad is not None
        assert torch.equal(model.second.weight.grad, torch.full((WIDTH,), 2.0))


@pytest.mark.core
def test_a_model_on_meta_that_gets_a_real_batch() -> None:
    with torch.device("meta"):
        model = Stack()
    call = compile_eagerly(model)
    with fake_world(2), pytest.raises(ConfigError, match="on the meta device: it has no value") as caught:
        call(torch.ones(2, WIDTH))
    assert "fsdp_compile.fully_shard(model, param_init_fn=...)" in (caught.value.instead or "")


class _Task(nn.Module):
    """A training task, as frameworks have, whose part is called without it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@long.parametrize("form", ["fully_shard", "called"], always=["fully_shard"])
@on_ranks()
def test_every_call_of_a_sharded_model_trains_it(form: str) -> None:
    """What the refusal advises, and what is no reason for it."""
    pair = WithOneProcess(_Task, Run.PLAIN, shape=WIDTH)
    if form == "fully_shard":
        fully_shard(pair.model)
    else:
        pair.call(torch.ones(2, WIDTH))
    pair.train(pair.call.net, other=pair.reference.net)
