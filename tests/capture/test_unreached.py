"""Models whose forward Dynamo leaves to Python are sharded as a whole, and train as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, fully_shard
from tests import long
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Stack
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess, close, compile_eagerly, loss_of

Call = Callable[[torch.Tensor], torch.Tensor]


def _train(call: Call, model: nn.Module, reference: nn.Module) -> None:
    """Steps by hand beside one process that has the whole batch; of an `nn.LSTM`, in its second dimension."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for _ in range(3):
        batch = torch.randn(3, 2 * world, WIDTH)
        loss_of(call(batch.chunk(world, 1)[rank])).backward()
        output = reference(batch)
        loss_of(output if isinstance(output, torch.Tensor) else output[0]).backward()
        with torch.no_grad():
            for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert isinstance(mine, DTensor), name
                assert isinstance(mine.grad, DTensor), name
                assert theirs.grad is not None
                close(mine.grad.full_tensor(), theirs.grad, f"gradient of {name}")
                mine.sub_(0.1 * mine.grad)
                theirs.sub_(0.1 * theirs.grad)
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.long
@pytest.mark.parametrize("form", ["module", "module.compile"])
@on_ranks()
def test_models_of_one_class_past_the_recompile_limit_train_as_in_one_process(form: str) -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        for seed in range(5):
            torch.manual_seed(seed)
            model = Stack()
            reference = copy.deepcopy(model)
            call: Call = model
            if form == "module.compile":
                fully_shard(model).compile(backend="fsdp", options={"lower": "eager"})
            else:
                call = compile_eagerly(model)
            _train(lambda x: call(x.flatten(0, 1)), model, nn.Sequential(nn.Flatten(0, 1), reference))  # noqa: B023


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
    """A training task, as frameworks have, whose other methods do not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).sum()


@long.parametrize("form", ["fully_shard", "called"], always=["fully_shard"])
@on_ranks()
def test_every_call_of_a_sharded_model_trains_it(form: str) -> None:
    """What the refusal advises, and what is no reason for it."""
    torch.manual_seed(0)
    task = _Task()
    reference = copy.deepcopy(task.net)
    compiled: Any = compile_eagerly(task)
    step = lambda x: compiled.net(x.flatten(0, 1))  # noqa: E731
    if form == "fully_shard":
        fully_shard(task)
    elif form == "called":
        compiled(torch.ones(2, WIDTH))
    _train(step, task.net, nn.Sequential(nn.Flatten(0, 1), reference))
