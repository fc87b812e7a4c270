"""One line on an unsharded model: its first call shards it, and what is left on it until then."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, full_params, fully_shard, units
from tests import long
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Stack
from tests.models.outlines import Small, Transformer
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess, close, compile_eagerly, compile_in_place, made


def _train(call: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, reference: nn.Module | None = None) -> None:
    """Two SGD steps of `call`, which runs `model`, against `reference` (a copy) on the whole batch."""
    pair = WithOneProcess(lambda: model, Run.UNSHARDED, reference=reference, optimizer=_momentum, twice=False)
    pair.train(call)


def _momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _is_sharded(model: nn.Module) -> bool:
    """Whether a model's parameters are, once what FSDP2 keeps of the root after an evaluation is freed."""
    assert isinstance(model, FSDPModule)
    model.reshard()
    return all(isinstance(parameter, DTensor) == bool(parameter.dim()) for parameter in model.parameters())


class _Other(Small):
    """The first argument of forward has another name, and the model's own names are in the way."""

    def forward(this, self: torch.Tensor) -> torch.Tensor:  # noqa: N805
        return super().forward(self)


class _LeftToPython(nn.Module):
    """Its forward cannot be resumed after a graph break, so Dynamo compiles the children's; two share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Matrix(torch.randn(6, 6)), _Matrix(None)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            torch._dynamo.graph_break()
            return self.second(torch.tanh(self.first(x)))
        finally:
            pass


class _Matrix(nn.Module):
    def __init__(self, weight: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        return x @ self.weight


class _Nested(nn.Module):
    """A model in a model: the outermost one is sharded, as one model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Small()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.gain


class _Task(Small):
    """As frameworks have it: they call methods, which call the module itself."""

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.cat([x[:, 3:], self(x)], dim=1)
        return x


@pytest.mark.core
@long.parametrize("make", [_Other, _Nested, _LeftToPython], always=[_LeftToPython])
@on_ranks()
def test_however_its_forward_is(make: Callable[[], nn.Module]) -> None:
    model = made(make)
    _train(compile_eagerly(model), model)


@pytest.mark.core
@on_ranks()
def test_methods_of_a_module_that_is_compiled_in_place() -> None:
    model = made(_Task)
    reference = copy.deepcopy(model)
    compile_in_place(fully_shard(model))
    _train(model.training_step, model, reference)
    x = torch.randn(2, 6)
    with torch.no_grad():
        close(model.generate(x), reference.generate(x), "generate")
        with full_params(model), torch.compiler.set_stance("force_eager"):
            close(model.generate(x), reference.generate(x), "generate inside full_params")


def test_the_first_call_splits_the_model_and_ends_there() -> None:
    with fake_world(2):
        model = Transformer()
        compile_eagerly(model)(torch.arange(8).reshape(2, 4))
        assert {u.title for u in units(model)} == {"(root)", "embed", "blocks.0", "blocks.1", "blocks.2", "head"}
        assert type(model.head.weight) is DTensor, "in the frame that made the first call, outside of forward"


@on_ranks()
def test_values_of_the_first_rank_alone() -> None:
    """The others have the model on meta; the optimizer is made before any has its part."""
    reference = made(Small)
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = made(Small)
    _train(compile_eagerly(model, sync_module_states=True), model, reference)


@on_ranks(timeout_s=60)
def test_values_of_no_rank() -> None:
    with torch.device("meta"):
        model = Small()
    with pytest.raises(ConfigError, match=r"on the meta device: it has no value\n  where: scale"):
        compile_eagerly(model, sync_module_states=True)(torch.ones(2, 6))


@pytest.mark.long
@on_ranks()
def test_inference_only() -> None:
    model = made(Small).requires_grad_(requires_grad=False).eval()
    reference = copy.deepcopy(model)
    compiled = compile_eagerly(model)
    for rows in (2, 3):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(compiled(x), reference(x))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), reference(x))
    assert _is_sharded(model)


def test_without_a_process_group_the_missing_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(ConfigError, match=r"no process group is initialized.* lacks WORLD_SIZE, MASTER_PORT") as caught:
        compile_eagerly(Small())(torch.ones(2, 6))
    assert "torchrun --nproc-per-node" in str(caught.value)


def test_a_layer_that_is_a_unit_is_dropped_from_a_sharded_model() -> None:
    with fake_world(1):
        model: Any = Stack()
        for block in model.blocks:
            fully_shard(block)
        compiled = compile_eagerly(fully_shard(model))
        compiled(torch.ones(2, WIDTH)).sum().backward()
        del block
        model.blocks = model.blocks[:1]
        gc.collect()
        assert len(compiled(torch.ones(2, WIDTH))) == 2


def test_a_first_call_that_fails_is_tried_again() -> None:
    model = nn.LSTM(WIDTH, WIDTH)  # Dynamo compiles nothing of it, which would be another occasion
    call = compile_eagerly(model)
    for _ in range(2):
        with pytest.raises(ConfigError, match="no process group"):
            call(torch.ones(3, 2, WIDTH))
    with fake_world(2):
        call(torch.ones(3, 2, WIDTH))
        assert isinstance(model, FSDPModule)


def test_values_in_the_place_of_parameters_are_not_the_first_call() -> None:
    with fake_world(2):
        model = nn.LSTM(WIDTH, WIDTH)
        call: Any = compile_eagerly(model)
        values = {name: torch.zeros_like(p) for name, p in call.named_parameters()}
        torch.func.functional_call(call, values, torch.ones(3, 2, WIDTH))
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        call(torch.ones(3, 2, WIDTH))
        assert isinstance(model, FSDPModule)


@pytest.mark.long
@pytest.mark.parametrize("first", ["called", "fully_shard"])
@on_ranks()
def test_every_wrapper_of_a_container_follows_conversions(first: str) -> None:
    """A container with two wrappers, of which the second is called first after a conversion."""
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
    pair = WithOneProcess(lambda: nn.Sequential(*layers), Run.PLAIN, shape=WIDTH)
    second = compile_eagerly(pair.model)
    if first == "called":
        pair.backward()
    else:
        fully_shard(pair.model)
    pair.change(lambda model: model.zero_grad())
    pair.change(lambda model: model.double())
    pair.dtype = torch.float64
    pair.call = second
    for _ in range(2):
        pair.backward()
    pair.compare()


@pytest.mark.parametrize("make", [Stack, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH))], ids=["class", "Sequential"])
def test_a_model_that_torch_shards_after_its_compile_is_taken_over(make: Callable[[], nn.Module]) -> None:
    with fake_world(2):
        model = make()
        call = compile_eagerly(model)
        fsdp2(model)
        call(torch.ones(2, WIDTH)).sum().backward()
        assert isinstance(model, FSDPModule)
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_lazy_model_is_refused_when_it_is_called_and_not_before() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    call = compile_eagerly(model)
    with fake_world(2), pytest.raises(ConfigError, match="no shape yet"):
        call(torch.ones(2, WIDTH))


@pytest.mark.parametrize("make", [Stack, lambda: nn.Linear(WIDTH, WIDTH)], ids=["class", "of-torch"])
@pytest.mark.parametrize("called", [True, False])
def test_nothing_of_a_compiled_model_is_kept(make: Callable[[], nn.Module], called: bool) -> None:  # noqa: FBT001
    with fake_world(2), torch.no_grad():
        model: nn.Module = make()
        batch = torch.ones(2, WIDTH)
        compiled: Any = compile_eagerly(model)
        if called:
            compiled(batch)
        kept: list[weakref.ref[Any]] = [weakref.ref(batch), weakref.ref(model)]
        del model, batch, compiled
        gc.collect()
        assert [reference() for reference in kept] == [None, None]


def test_a_first_call_whose_forward_fails() -> None:
    with fake_world(2):
        model = Stack()
        call = compile_eagerly(model)
        with pytest.raises(Exception, match="shape"):
            call(torch.ones(2, WIDTH + 1))
        for _ in range(2):
            call(torch.ones(2, WIDTH)).sum().backward()
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
