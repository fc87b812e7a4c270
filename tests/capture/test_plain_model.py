"""One line on an unsharded model: however the model is reached, its first call shards it, and it trains as before."""

from __future__ import annotations

import copy
import gc
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, UnsupportedModelError, full_params, fully_shard, units
from tests import long
from tests.beside import close, compile_eagerly, loss_of
from tests.fake_world import fake_world
from tests.models.outlines import Small, Transformer
from tests.ranks import run_ranks


def _train(call: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, reference: nn.Module | None = None) -> None:
    """Two SGD steps of `call`, which runs `model`, against `reference` (a copy) on the whole batch."""
    reference = copy.deepcopy(model) if reference is None else reference
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(2):
        batch = torch.randn(2 * world, 6, generator=torch.Generator().manual_seed(step))
        loss_of(call(batch.chunk(world)[rank])).backward()
        loss_of(reference(batch)).backward()
        for name, parameter in model.named_parameters():
            expected = reference.get_parameter(name).grad
            assert (parameter.grad is None) == (expected is None), name
            if expected is not None:
                assert isinstance(parameter.grad, DTensor), name
                close(parameter.grad.full_tensor(), expected, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        close(parameter.full_tensor(), reference.get_parameter(name), name)


class _Other(Small):
    """The first argument of forward has another name, and the model's own names are in the way."""

    def forward(this, self: torch.Tensor) -> torch.Tensor:  # noqa: N805
        return super().forward(self)


class _Breaks(Small):
    """Graph breaks before the first read, and between reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        x = torch.tanh(self.up(x))
        torch._dynamo.graph_break()
        return self.down(x) * self.scale


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


def _module(make: Callable[[], nn.Module]) -> None:
    model = make()
    _train(compile_eagerly(model), model)


def _module_itself_compiled() -> None:
    model = Small()
    model.compile(backend="fsdp", options={"lower": "eager"})
    _train(model, model)


class _Task(Small):
    """As frameworks have it: they call methods, which call the module itself."""

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.cat([x[:, 3:], self(x)], dim=1)
        return x


def _methods_of_a_module_itself_compiled() -> None:
    model = _Task()
    reference = copy.deepcopy(model)
    model.compile(backend="fsdp", options={"lower": "eager"})
    _train(model.training_step, model, reference)
    x = torch.randn(2, 6)
    with torch.no_grad():
        close(model.generate(x), reference.generate(x), "generate")
        with full_params(model):
            with pytest.raises(BackendCompilerFailed, match="set_stance"):
                model.generate(x)
            with torch.compiler.set_stance("force_eager"):
                close(model.generate(x), reference.generate(x), "generate inside full_params")


def _closure() -> None:
    model = Small()

    @compile_eagerly
    def call(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    _train(call, model)


GLOBAL: nn.Module = nn.Identity()


@compile_eagerly
def _call_global(x: torch.Tensor) -> torch.Tensor:
    return GLOBAL(x)


def _left_to_python() -> None:
    model = _LeftToPython()

    @compile_eagerly
    def call(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    with pytest.warns(UserWarning, match="Dynamo runs the call of _LeftToPython by a compiled function in Python"):
        _train(call, model)
    assert [unit.root for unit in units(model)] == [model]


def _global() -> None:
    globals()["GLOBAL"] = Small()
    _train(_call_global, GLOBAL)


class _Holder:
    """Holds a model without being a module."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = {"model": model}

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["model"](x)


def _object_argument() -> None:
    model = Small()
    holder = _Holder(model)

    @compile_eagerly
    def call(holder: _Holder, x: torch.Tensor) -> torch.Tensor:
        return holder.run(x)

    _train(lambda x: call(holder, x), model)


def _bound_method() -> None:
    model = Small()
    _train(compile_eagerly(_Holder(model).run), model)


def _break_in_a_function() -> None:
    model = Small()

    @compile_eagerly
    def call(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return model(x - 1)

    _train(call, model)


def _computation_around_it() -> None:
    """More than the model is in the graph: what comes before and after it."""
    model = Small()

    @compile_eagerly
    def call(x: torch.Tensor) -> torch.Tensor:
        return model(x * 2 / 2) + 0

    _train(call, model)


CASES: dict[str, Callable[[], None]] = {
    "module": lambda: _module(Small),
    "first-argument-not-named-self": lambda: _module(_Other),
    "graph-breaks": lambda: _module(_Breaks),
    "nested": lambda: _module(_Nested),
    "module.compile": _module_itself_compiled,
    "methods-of-module.compile": _methods_of_a_module_itself_compiled,
    "closure": _closure,
    "forward-left-to-python": _left_to_python,
    "module-left-to-python": lambda: _module(_LeftToPython),
    "global": _global,
    "object-argument": _object_argument,
    "bound-method": _bound_method,
    "graph-break-in-a-function": _break_in_a_function,
    "computation-around-it": _computation_around_it,
}


def _run_cases(names: list[str]) -> None:
    for name in names:
        torch.manual_seed(0)
        CASES[name]()


@pytest.mark.core
@long.parametrize("name", CASES, always=["methods-of-module.compile", "module-left-to-python", "object-argument"])
def test_however_the_model_is_reached(name: str) -> None:
    run_ranks(_run_cases, [name])


def _check_units() -> None:
    torch.manual_seed(0)
    model = Transformer()
    compiled = compile_eagerly(model)
    tokens = torch.arange(8).reshape(2, 4)
    compiled(tokens)
    assert [u.title for u in units(model) if u.title != "(root)"] == [
        "embed",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "head",
    ]
    assert type(model.head.weight) is DTensor, "in the frame that made the first call, outside of forward"


def test_the_first_call_splits_the_model_and_ends_there() -> None:
    with fake_world(2):
        _check_units()


def _check_two_models() -> None:
    torch.manual_seed(0)
    first, second = Small(), nn.Linear(3, 2)
    both = nn.Sequential(first, second)
    reference = copy.deepcopy(both)

    @compile_eagerly
    def call(x: torch.Tensor) -> torch.Tensor:
        return second(first(x))

    world, rank = dist.get_world_size(), dist.get_rank()
    batch = torch.randn(2 * world, 6)
    loss_of(call(batch.chunk(world)[rank])).backward()
    loss_of(reference(batch)).backward()
    for name, parameter in both.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        close(parameter.grad.full_tensor(), reference.get_parameter(name).grad, name)
    assert [[u.title for u in units(m)] for m in (first, second)] == [["(root)"], ["(root)"]]


def test_two_models_in_one_function() -> None:
    run_ranks(_check_two_models)


def _check_first_call_without_gradients() -> None:
    torch.manual_seed(0)
    model = Small()
    reference = copy.deepcopy(model)
    compiled = compile_eagerly(model)
    x = torch.randn(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), reference(x))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    _train(compiled, model, reference)


def test_inference_first_then_training() -> None:
    run_ranks(_check_first_call_without_gradients)


def _check_inference_only() -> None:
    torch.manual_seed(0)
    model = Small().requires_grad_(requires_grad=False).eval()
    reference = copy.deepcopy(model)
    compiled = compile_eagerly(model)
    for rows in (2, 3):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(compiled(x), reference(x))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), reference(x))
    assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.long
def test_inference_only() -> None:
    run_ranks(_check_inference_only)


def _check_parameter_of_no_module() -> str:
    loose = nn.Parameter(torch.ones(3))

    @compile_eagerly
    def call(x: torch.Tensor) -> torch.Tensor:
        return x * loose

    with pytest.raises(Exception, match="belongs to no torch") as caught:
        call(torch.ones(3))
    cause = caught.value.inner_exception  # type: ignore[attr-defined]
    assert isinstance(cause, UnsupportedModelError)
    plain = torch.ones(3, requires_grad=True)
    assert torch.equal(compile_eagerly(lambda x: x * plain)(torch.ones(3)), torch.ones(3)), "what it says instead"
    return str(cause)


def test_a_parameter_that_belongs_to_no_module_is_refused_by_its_expression() -> None:
    assert "loose" in run_ranks(_check_parameter_of_no_module)[0]


def _train_where(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A forward and a backward in this process, which has no group yet, with some of the variables of `torchrun`."""
    assert not dist.is_initialized()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    model = Small()
    compile_eagerly(model)(torch.ones(2, 6)).sum().backward()
    return model


def test_the_process_group_is_started_from_torchruns_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    model = _train_where(variables, monkeypatch)
    assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
    assert all(isinstance(p, DTensor) for p in model.parameters())


def test_without_a_process_group_the_missing_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="no process group is initialized") as caught:
        _train_where({"RANK": "0", "MASTER_ADDR": "localhost"}, monkeypatch)
    cause = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(cause, ConfigError)
    assert "lacks WORLD_SIZE, MASTER_PORT" in str(cause)
    assert "torchrun --nproc-per-node" in str(cause)


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def _check_cut(*, by_policy: bool, is_kept: bool) -> None:
    torch.manual_seed(0)
    trunk: Any = nn.Sequential(nn.Linear(6, 6), nn.Sequential(*(_Block() for _ in range(4))))
    whole = copy.deepcopy(trunk)
    fully_shard(trunk, auto_wrap_policy=ModuleWrapPolicy({_Block}) if by_policy else None)
    assert len(units(trunk)) > 4
    removed = list(trunk[1][2:])
    for each in (trunk, whole):
        del each[1][2:]
    if not is_kept:
        removed.clear()
        gc.collect()
    model = nn.Sequential(trunk, nn.Linear(6, 4))
    reference = nn.Sequential(whole, copy.deepcopy(model[1]))
    _train(compile_eagerly(fully_shard(model)), model, reference)
    for layer in removed:
        layer(torch.ones(2, 6)).sum().backward()
        assert isinstance(layer.up.weight.grad, DTensor)


def _check_cuts() -> None:
    for by_policy in (False, True):
        for is_kept in (False, True):
            _check_cut(by_policy=by_policy, is_kept=is_kept)


def test_a_trunk_whose_last_layers_are_cut_off_is_sharded_again_in_a_larger_model() -> None:
    run_ranks(_check_cuts)


def test_a_layer_that_is_a_unit_is_dropped_from_a_sharded_model() -> None:
    with fake_world(1):
        model: Any = _Stack()
        for layer in model.layers:
            fully_shard(layer)
        compiled = compile_eagerly(fully_shard(model))
        compiled(torch.ones(2, 4)).sum().backward()
        del layer
        model.layers = model.layers[:1]
        gc.collect()
        assert compiled(torch.ones(2, 4)).shape == (2, 4)
