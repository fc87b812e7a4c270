"""The one line on a plain model: sharded at its first call, whatever is compiled and however it is called first."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile import no_sync
from fsdp_compile.errors import ConfigError, RankMismatchError, UnsupportedModelError
from tests import long
from tests.models.layers import Residual
from tests.ranks import on_ranks
from tests.two_sides import Make, Run, WithOneProcess, adamw, compile_eagerly


class Block(Residual):
    def __init__(self) -> None:
        super().__init__(6, 9)


class Model(nn.Module):
    """Two blocks and a head, all of sizes that two ranks share unevenly or evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def pair_of(make: Callable[[], nn.Module] = Model, optimizer: Make = adamw) -> WithOneProcess:
    """Optimizers are made before anything is sharded; what a test compiles, it assigns to `call`."""
    return WithOneProcess(make, Run.UNSHARDED, optimizer=optimizer, twice=False)


class Recurrent(nn.Module):
    """Dynamo leaves its forward to Python, so that no graph reads a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class Breaks(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.head(x)


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def _masked(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * torch.ones(3)


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        first, second = (self.get_submodule(f"blocks.{i}.up") for i in (0, 1))
        second.weight = first.weight


MODELS: list[Callable[[], nn.Module]] = [Model, Breaks, _layers, Tied]


@long.parametrize("make", MODELS, always=[Tied])
@on_ranks()
def test_trains_as_one_process(make: Callable[[], nn.Module]) -> None:
    pair = pair_of(make)
    pair.call = compile_eagerly(pair.model)
    assert not any(isinstance(p, DTensor) for p in pair.model.parameters())
    pair.train(steps=3)
    # Another compile of the same model, and one after a reset.
    pair.call = compile_eagerly(pair.model)
    pair.train(steps=1)
    torch._dynamo.reset()
    pair.train(steps=1)


@pytest.mark.long
@on_ranks()
def test_first_called_in_an_evaluation_or_twice() -> None:
    for context in (torch.no_grad(), torch.inference_mode()):
        pair = pair_of()
        pair.call = compile_eagerly(pair.model.eval())
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(9))
        with context:
            torch.testing.assert_close(pair.call(x), pair.reference(x))
        pair.model.train()
        pair.train()
    # Twice before backward.
    pair = pair_of()
    compiled, forward = compile_eagerly(pair.model), pair.reference.forward
    pair.call = lambda x: compiled(x) + compiled(2 * x)
    pair.reference.forward = lambda x: forward(x) + forward(2 * x)
    pair.train()
    # Its forward alone, whose call has begun when it is sharded.
    pair = pair_of()
    pair.call = compile_eagerly(pair.model).forward
    pair.train()


@on_ranks()
def test_first_called_under_no_sync() -> None:
    pair = pair_of()
    pair.call = compile_eagerly(pair.model)
    for _ in range(2):
        with no_sync(pair.model):
            pair.backward()
        assert all(p.grad is None for p in pair.model.parameters())
        pair.backward()
        pair.update()
        pair.compare()


@on_ranks()
def test_options_for_sharding_are_used_or_refused() -> None:
    pair = pair_of()
    wrap = ModuleWrapPolicy({Block})
    not_called = compile_eagerly(pair.model)
    pair.call = compile_eagerly(pair.model, reshard_after_forward=False)
    pair.train(steps=1)
    pair.call = compile_eagerly(pair.model, reshard_after_forward=False)
    pair.train(steps=1)
    not_called(torch.randn(2, 6)).sum().backward()
    with pytest.raises(BackendCompilerFailed, match="'auto_wrap_policy' says how to shard"):
        compile_eagerly(pair.model, auto_wrap_policy=wrap)(torch.randn(2, 6))
    before = Model()
    torch_fully_shard(before)
    with pytest.raises(BackendCompilerFailed, match="'reshard_after_forward' says how to shard"):
        compile_eagerly(before, reshard_after_forward=False)(torch.randn(2, 6))


@on_ranks()
def test_a_compiled_function_that_trains_a_plain_model_is_refused_by_name() -> None:
    x = torch.randn(2, 6)

    plain = Model()
    with pytest.raises(BackendCompilerFailed, match=r"(?s)trains a plain model.*torch\.compile\(model"):
        compile_eagerly(lambda x: plain(x).sum())(x)
    with torch.no_grad():  # each rank computes with its whole copy, and nothing is trained
        torch.testing.assert_close(compile_eagerly(lambda x: plain(x).sum())(x), plain(x).sum())

    recurrent = Recurrent()
    with pytest.raises(ConfigError, match=r"(?s)trains a plain model.*Recurrent, parameter rnn.weight_ih_l0"):
        compile_eagerly(lambda x: recurrent(x).sum())(x)

    alone = nn.GRU(6, 6)  # whose call, in torch's own module, Dynamo starts no frame for
    with pytest.raises(ConfigError, match=r"(?s)trains a plain model.*GRU, parameter weight_ih_l0"):
        compile_eagerly(lambda x: alone(x)[0].sum())(x)
    alone.requires_grad_(requires_grad=False)
    torch.testing.assert_close(compile_eagerly(lambda x: alone(x)[0].sum())(x), alone(x)[0].sum())

    stepped = Breaks()
    optimizer = torch.optim.SGD(stepped.parameters(), lr=0.1)
    before = [p.detach().clone() for p in stepped.parameters()]

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = stepped(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with pytest.raises(ConfigError, match="trains a plain model"):
        compile_eagerly(step)(x)
    assert all(torch.equal(a, b) for a, b in zip(before, stepped.parameters(), strict=True))


@on_ranks()
def test_what_no_rank_would_average_is_refused_by_name() -> None:
    x = torch.randn(2, 6)

    with pytest.raises(ConfigError, match="meta device"):
        compile_eagerly(Model().to("meta"))(x.to("meta"))
    scripted = nn.Sequential(nn.Linear(6, 6), torch.jit.script(nn.Linear(6, 3)))
    with pytest.raises(UnsupportedModelError, match="TorchScript"):
        compile_eagerly(scripted)(x)
    graded = Model()
    graded(x).sum().backward()
    with pytest.raises(ConfigError, match="a gradient from before"):
        compile_eagerly(graded)(x)
    graded.zero_grad()
    graded.head.bias.register_hook(_masked)
    with pytest.raises(ConfigError, match="hooks on its gradient") as caught:
        compile_eagerly(graded)(x)
    assert re.fullmatch(r"head\.bias, hook _masked \(.*test_plain\.py:\d+\)", caught.value.where or "")
    assert "distribute_tensor(mask, g.device_mesh, g.placements)" in (caught.value.instead or "")

    nothing = nn.Sequential(nn.Tanh())
    torch.testing.assert_close(compile_eagerly(nothing)(x), torch.tanh(x))


@pytest.mark.long
@on_ranks()
def test_several_compiled_parts() -> None:
    # A part that is called first, of a model that is compiled, too.
    pair = pair_of()
    block, pair.call = compile_eagerly(pair.model.get_submodule("blocks.0")), compile_eagerly(pair.model)
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(9))
    torch.testing.assert_close(block(x), pair.reference.get_submodule("blocks.0")(x))
    pair.train()

    # ... and of one that is compiled later.
    model = Model()
    compile_eagerly(model.blocks[0])(x)
    with pytest.raises(ConfigError, match="a part of the model, Block, was sharded"):
        compile_eagerly(model)(x)

    trunk = Block()
    actor, critic = nn.Sequential(trunk, nn.Linear(6, 2)), nn.Sequential(trunk, nn.Linear(6, 1))
    compile_eagerly(actor)(x)
    with pytest.raises(ConfigError, match="a parameter of a model that is sharded, too"):
        compile_eagerly(critic)(x)

    # A compiled part with an optimizer that trains a plain rest.
    first, head = compile_eagerly(nn.Linear(6, 6)), nn.Linear(6, 3)
    optimizer = torch.optim.SGD([*first.parameters(), *head.parameters()], lr=0.1)
    head(first(x)).sum().backward()
    with pytest.raises(ConfigError, match="others that no rank averages"):
        optimizer.step()


@pytest.mark.long
@on_ranks()
def test_a_compiled_model_in_compiled_functions() -> None:
    # A compiled model, called by a compiled function, and an attribute of the object whose method is compiled.
    pair = pair_of()
    compiled = compile_eagerly(pair.model)
    pair.call = compile_eagerly(lambda x: 1 * compiled(x))
    pair.train()

    class Trainer:
        def __init__(self, model: Any) -> None:
            self.model = model

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    pair = pair_of()
    pair.call = compile_eagerly(Trainer(compile_eagerly(pair.model)).run)
    pair.train()


@pytest.mark.long
@on_ranks()
def test_copies_of_compiled_models() -> None:
    x = torch.randn(2, 6)
    model = Model()
    compiled = compile_eagerly(model)
    other = copy.deepcopy(compiled)
    torch.testing.assert_close(other(x), compiled(x))
    assert all(isinstance(p, DTensor) for each in (model, other) for p in each.parameters())
    plain = Model()
    compile_eagerly(plain)
    stored = io.BytesIO()
    torch.save(plain, stored)
    stored.seek(0)
    for each in (copy.deepcopy(plain), torch.load(stored, weights_only=False)):
        torch.testing.assert_close(each(x), plain(x))
        assert not any(isinstance(p, DTensor) for p in each.parameters())  # only what is compiled is sharded


@on_ranks()
def test_ranks_that_start_with_different_values() -> None:
    torch.manual_seed(dist.get_rank())
    model = Model()
    x = torch.randn(2, 6)
    with pytest.raises(RankMismatchError, match=r"(?s)different values.*manual_seed"):
        compile_eagerly(model)(x)
    buffer = nn.BatchNorm1d(6)
    buffer.get_buffer("running_mean").add_(dist.get_rank())
    with pytest.raises(RankMismatchError, match="running_mean" if dist.get_rank() else "values of a plain model"):
        compile_eagerly(buffer)(x)


@on_ranks(world_size=1)
def test_the_world_is_started_from_torchrun() -> None:
    dist.destroy_process_group()
    pair = pair_of()
    pair.call = compile_eagerly(pair.model)
    with pytest.raises(ConfigError, match="no process group"):
        pair.call(torch.randn(2, 6))
    with pytest.MonkeyPatch.context() as patch:
        names = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_RANK": "0"}
        for name, value in names.items():
            patch.setenv(name, value)
        pair.train()
    assert dist.get_world_size() == 1
