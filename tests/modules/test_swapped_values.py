"""Values in the place of parameters: `torch.func.functional_call`, and weights that code swaps by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.func import functional_call

from fsdp_compile import ConfigError, UnsupportedModelError, fully_shard
from tests import long
from tests.beside import Beside, Run, close, compile_eagerly, loss_of
from tests.fake_world import fake_world
from tests.ranks import run_ranks


class _FastWeights(nn.Module):
    """Calls a layer with values made of its weights, as model-agnostic meta-learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 2)

    def values(self) -> dict[str, torch.Tensor]:
        return {name: p * 1.5 - 0.1 for name, p in self.layer.named_parameters()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(functional_call(self.layer, self.values(), (x,)) + self.layer(x))


class _Learner(_FastWeights):
    """Takes a step of gradient descent from its own parameters, and differentiates through it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own: dict[str, torch.Tensor] = {name: p for name, p in self.layer.named_parameters()}  # noqa: C416  of tensors
        known = torch.ones(3, 6)  # of all ranks: what each learns from its own rows, one process learns from all rows
        loss = functional_call(self.layer, own, (known,)).square().mean()
        gradients = torch.autograd.grad(loss, list(own.values()), create_graph=True)
        step = {name: p - 0.5 * gradient for (name, p), gradient in zip(own.items(), gradients, strict=True)}
        return self.head(functional_call(self.layer, step, (x,)))


class _Broken(_FastWeights):
    """A graph break comes before the call, so that only the layer's own forward is compiled."""

    @torch._dynamo.disable(recursive=False)
    def call(self, x: torch.Tensor) -> torch.Tensor:
        return functional_call(self.layer, self.values(), (x,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.call(x) + self.layer(x))


class _Generated(nn.Module):
    """Replaces a layer's weight by one that another layer computes, for one call."""

    def __init__(self) -> None:
        super().__init__()
        self.hyper, self.layer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.layer._parameters["weight"]
        assert kept is not None
        del self.layer.weight
        setattr(self.layer, "weight", self.hyper.weight * 2)  # noqa: B010  typed as a parameter
        y = self.layer(x)
        del self.layer.weight
        self.layer.weight = kept
        return y + self.layer(x)


class _PutBack(_Generated):
    """The same with the weight that a forward reads, which is put back by both ways there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: Any = self.layer.weight
        for put_back in (self.layer.register_parameter, lambda name, value: setattr(self.layer, name, value)):
            del self.layer.weight
            setattr(self.layer, "weight", self.hyper.weight * 2)  # noqa: B010  typed as a parameter
            x = self.layer(x)
            del self.layer.weight
            put_back("weight", kept)
        return self.layer(x)


class _Tied(nn.Module):
    """Two layers share a weight; the value for one is one for both."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.both[1].weight = self.both[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional_call(self.both, {"0.weight": self.both.get_parameter("0.weight") * 2}, (x,))


def _check(make: Callable[[], nn.Module], how: Run) -> None:
    pair = Beside(make, how)
    pair.optimize(lambda p: torch.optim.SGD(p, lr=0.1))
    pair.step()
    pair.step()


@long.parametrize(
    "make", [_FastWeights, _Learner, _Broken, _Generated, _PutBack, _Tied], always=[_Broken, _Generated, _PutBack]
)
def test_values_are_read_in_the_place_of_parameters(make: Callable[[], nn.Module]) -> None:
    run_ranks(_check, make, Run.EAGER)


@long.parametrize(
    "make", [_FastWeights, _Learner, _Broken, _Generated, _Tied], always=[_FastWeights, _Learner, _Generated]
)
def test_compiled_code_reads_values_that_are_swapped_around_it(make: Callable[[], nn.Module]) -> None:
    run_ranks(_check, make, Run.SHARDED)


@pytest.mark.long
def test_a_plain_model_with_functional_calls_is_sharded_and_left_to_python() -> None:
    run_ranks(_check, _FastWeights, Run.PLAIN)


@pytest.mark.parametrize("make", [_FastWeights, _Tied])
def test_functional_calls_in_one_graph_are_refused(make: Callable[[], nn.Module]) -> None:
    with fake_world(2):
        model: Any = fully_shard(make())
        called = torch.compile(model, backend="fsdp", options={"lower": "eager"}, fullgraph=True)
        with pytest.raises(BackendCompilerFailed, match="the given values would be ignored") as caught:
            called(torch.ones(2, 6))
        error = caught.value.inner_exception
        assert isinstance(error, UnsupportedModelError)
        assert "in forward" in (error.where or "")


def _check_around(how: Run) -> None:
    """Values for a whole model, from outside of it; gradients go to the values."""
    pair = Beside(_FastWeights if how is Run.EAGER else _Plain, how)
    pair.step()
    called: Any = pair.compiled
    prefix = "" if how is Run.EAGER else "_orig_mod."
    rank = torch.arange(4.0 * dist.get_world_size()).sin().chunk(dist.get_world_size())[dist.get_rank()]
    x = rank[:, None].expand(-1, 6) + torch.arange(6.0)
    for scale in (1.0, 2.0, 2.0):
        values = {
            name: (scale * torch.arange(p.numel()).cos().reshape(p.shape)).requires_grad_()
            for name, p in pair.reference.named_parameters()
        }
        copies = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
        given = {f"{prefix}{name}": value for name, value in values.items()}
        mine = loss_of(functional_call(called, given, (x,)))
        theirs = loss_of(functional_call(pair.reference, copies, (x,)))
        close(mine.detach(), theirs, "loss")
        mine.backward()
        theirs.backward()
        for name, value in values.items():
            assert value.grad is not None, name
            close(value.grad, copies[name].grad, name)
    pair.compare()
    pair.optimize(lambda p: torch.optim.SGD(p, lr=0.1))
    pair.step()


def test_values_that_a_compiled_function_cannot_notice_are_refused() -> None:
    with fake_world(2):
        model = _Plain()

        def call(x: torch.Tensor) -> torch.Tensor:
            return model(x)

        compiled = compile_eagerly(call)
        compiled(torch.ones(2, 6))
        values = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
        with (
            pytest.raises(ConfigError, match=r"a value stands in the place[\s\S]*where: 0.weight"),
            torch.nn.utils.stateless._reparametrize_module(model, values),
        ):
            compiled(torch.ones(2, 6))
        compiled(torch.ones(2, 6)).sum().backward()


class _Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


@long.parametrize("how", [Run.EAGER, Run.SHARDED], always=[Run.EAGER])
def test_values_for_a_whole_model(how: Run) -> None:
    run_ranks(_check_around, how)
