"""Models whose forward Dynamo leaves to Python are sharded as a whole, or refused before a rank trains its own copy."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, UnsupportedModelError, fully_shard
from tests import long
from tests.beside import Beside, Run, close, compile_eagerly, loss_of
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Stack
from tests.ranks import run_ranks


class Recurrent(nn.Module):
    """Dynamo leaves its forward to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


class _Holder:
    """Holds models without being a module."""

    def __init__(self) -> None:
        self.model = Recurrent()
        self.parts = {"cell": nn.LSTM(WIDTH, WIDTH)}

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def run_part(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["cell"](x)[0]


GLOBAL = nn.LSTM(WIDTH, WIDTH)
Call = Callable[[torch.Tensor], torch.Tensor]


def _closure() -> tuple[Call, nn.Module]:
    cell = nn.LSTM(WIDTH, WIDTH)
    return compile_eagerly(lambda x: cell(x)[0]), cell


def _global() -> tuple[Call, nn.Module]:
    return compile_eagerly(lambda x: GLOBAL(x)[0]), GLOBAL


def _argument() -> tuple[Call, nn.Module]:
    model = Recurrent()
    call = compile_eagerly(lambda one, x: one(x))
    return lambda x: call(model, x), model


def _list_of_arguments() -> tuple[Call, nn.Module]:
    cell = nn.LSTM(WIDTH, WIDTH)
    call = compile_eagerly(lambda several, x: several[0](x)[0])
    return lambda x: call([cell], x), cell


def _method() -> tuple[Call, nn.Module]:
    holder = _Holder()
    return compile_eagerly(holder.run), holder.model


def _part_of_an_attribute() -> tuple[Call, nn.Module]:
    holder = _Holder()
    return compile_eagerly(holder.run_part), holder.parts["cell"]


def _module() -> tuple[Call, nn.Module]:
    model = Recurrent()
    return compile_eagerly(model), model


def _torchs_module() -> tuple[Call, nn.Module]:
    cell = nn.LSTM(WIDTH, WIDTH)
    compiled: Any = compile_eagerly(cell)
    return lambda x: compiled(x)[0], cell


def _module_itself_compiled() -> tuple[Call, nn.Module]:
    model = Recurrent()
    model.compile(backend="fsdp", options={"lower": "eager"})
    return model, model


def _one_of_two() -> tuple[Call, nn.Module]:
    first, second = nn.Linear(WIDTH, WIDTH, bias=False), Recurrent()
    nn.init.eye_(first.weight)  # not part of what is compared
    return compile_eagerly(lambda x: second(first(x))), second


REACHED: dict[str, Callable[[], tuple[Call, nn.Module]]] = {
    "argument": _argument,
    "method": _method,
    "module": _module,
    "module-of-torch": _torchs_module,
    "module.compile": _module_itself_compiled,
    "one-of-two": _one_of_two,
}
BY_FUNCTIONS = ("argument", "method", "one-of-two")
UNREACHED: dict[str, Callable[[], tuple[Call, nn.Module]]] = {
    "closure": _closure,
    "global": _global,
    "list-of-arguments": _list_of_arguments,
    "part-of-an-attribute": _part_of_an_attribute,
}
"""Functions that call an `nn.LSTM` by themselves: no user code is called that Dynamo would compile."""


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


def _trained(way: str) -> list[str]:
    """Trains two models of one class, one after the other; returns the warnings."""
    said = []
    for _ in range(1 if way in BY_FUNCTIONS else 2):  # of a function, Dynamo tells once
        torch.manual_seed(0)
        call, model = REACHED[way]()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _train(call, model, copy.deepcopy(model))
        said += [str(each.message) for each in caught if "in Python" in str(each.message)]
    return said


@pytest.mark.core
@long.parametrize("way", REACHED, always=["argument", "one-of-two"])
def test_its_training_is_that_of_one_process(way: str) -> None:
    for said in run_ranks(_trained, way):
        assert len(said) == (way in BY_FUNCTIONS)
        for warning in said:
            assert "Dynamo runs the call of Recurrent by a compiled function in Python" in warning
            assert "Attempted to wrap RNN, GRU, or LSTM" in warning
            assert "torch.compile(model, backend='fsdp')" in warning


@pytest.mark.core
@pytest.mark.parametrize("way", UNREACHED)
def test_its_first_backward_is_refused(way: str) -> None:
    with fake_world(2):
        call, model = UNREACHED[way]()
        with pytest.raises(UnsupportedModelError) as caught:
            call(torch.ones(2, 3, WIDTH)).sum().backward()
    assert "never reached the backend" in caught.value.what
    assert "Attempted to wrap RNN, GRU, or LSTM" in caught.value.what
    assert f"{type(model).__name__}, parameter " in (caught.value.where or "")
    assert "fsdp_compile.fully_shard(model) before the function's first call" in (caught.value.instead or "")


def _as_advised(advice: str) -> None:
    """What the refusal says to write instead."""
    torch.manual_seed(0)
    model = nn.LSTM(WIDTH, WIDTH)
    reference = copy.deepcopy(model)
    if advice == "fully_shard":
        fully_shard(model)
        call = compile_eagerly(lambda x: model(x)[0])
    else:
        compiled: Any = compile_eagerly(model)
        call = lambda x: compiled(x)[0]  # noqa: E731  as users write it
    _train(call, model, reference)


@pytest.mark.parametrize("advice", ["fully_shard", "compile-the-model"])
def test_what_the_refusal_advises(advice: str) -> None:
    run_ranks(_as_advised, advice)


def _past_the_recompile_limit() -> list[str]:
    """What comes of four models of a function with room for two compiles."""

    @compile_eagerly
    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    results = []
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in range(4):
            model = type(f"Linear{number}", (nn.Linear,), {})(4, 4)
            try:
                call(model, torch.ones(2, 4)).sum().backward()
                results.append(type(model.weight).__name__)
            except UnsupportedModelError as error:
                results.append(str(error))
    return results


def test_models_of_a_function_past_the_recompile_limit_are_refused() -> None:
    with fake_world(2):
        *first, third, fourth = _past_the_recompile_limit()
    assert first == ["DTensor", "DTensor"]
    for message, name in ((third, "Linear2"), (fourth, "Linear3")):
        assert "has met Dynamo's recompile_limit = 2 and runs in Python" in message
        assert f"{name}, parameter weight, in call (" in message
        assert "fully_shard(model) before" in message
        assert "torch._dynamo.config.recompile_limit" in message


def _many_of_a_class(form: str) -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        for seed in range(5):
            torch.manual_seed(seed)
            model = Stack()
            reference = copy.deepcopy(model)
            call: Call = model
            if form == "module.compile":
                model.compile(backend="fsdp", options={"lower": "eager"})
            else:
                call = compile_eagerly(model)
            _train(lambda x: call(x.flatten(0, 1)), model, nn.Sequential(nn.Flatten(0, 1), reference))  # noqa: B023


@pytest.mark.long
@pytest.mark.parametrize("form", ["module", "module.compile"])
def test_models_of_one_class_past_the_recompile_limit_train_as_in_one_process(form: str) -> None:
    run_ranks(_many_of_a_class, form)


def _late_at_the_limit() -> None:
    """A sharded model goes on in Python, to the numbers of one process."""
    pair = Beside(Stack, Run.PLAIN)
    pair.optimize(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False):
        pair.step(width=WIDTH)
        dtype = torch.float64
        pair.change(lambda model: model.to(dtype))
        for _ in range(2):
            pair.step(width=WIDTH, dtype=dtype)


def test_a_sharded_model_past_the_recompile_limit_trains_on() -> None:
    run_ranks(_late_at_the_limit)


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


def test_hooks_of_a_model_that_is_sharded_after_all_do_nothing() -> None:
    with fake_world(2):
        call, model = _closure()
        call(torch.ones(2, 3, WIDTH))
        fully_shard(model)
        call(torch.ones(2, 3, WIDTH)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.core
@pytest.mark.parametrize("form", ["module", "function", "module.compile"])
def test_a_model_on_meta_that_gets_a_real_batch(form: str) -> None:
    with torch.device("meta"):
        model = Stack()
    call: Call = model
    if form == "module.compile":
        model.compile(backend="fsdp", options={"lower": "eager"})
    else:
        call = compile_eagerly(model if form == "module" else lambda x: model(x))  # noqa: PLW0108
    with fake_world(2), pytest.raises(ConfigError, match="on the meta device and has no value yet") as caught:
        call(torch.ones(2, WIDTH))
    assert "fsdp_compile.materialize(model)" in (caught.value.instead or "")


class _Task(nn.Module):
    """A training task, as frameworks have, whose other methods do not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).sum()


def _wrapped(task: _Task) -> Any:
    return compile_eagerly(task)


def _task_in_place(task: _Task) -> Any:
    task.compile(backend="fsdp", options={"lower": "eager"})
    return task


def _inside_of_another_backend(task: _Task) -> Any:
    for block in task.net.blocks:
        block.compile(backend="fsdp", options={"lower": "eager"})
    task.training_step = torch.compile(task.training_step, backend="aot_eager")  # type: ignore[method-assign]
    return task


TASKS: dict[str, Callable[[_Task], Any]] = {
    "wrapped": _wrapped,
    "in-place": _task_in_place,
    "inside-of-another-backend": _inside_of_another_backend,
}


@pytest.mark.core
@pytest.mark.parametrize("form", TASKS)
def test_a_compiled_model_that_trains_by_other_calls_is_refused(form: str) -> None:
    task = _Task()
    compiled = TASKS[form](task)
    with pytest.raises(UnsupportedModelError, match="gets gradients before the first call") as caught:
        compiled.training_step(torch.ones(2, WIDTH)).backward()
    assert "parameter " in (caught.value.where or "")
    assert "those of the plain model" in (caught.value.instead or "")
    assert "or fsdp_compile.fully_shard(model)" in (caught.value.instead or "")


def _trained_by_another_method(form: str) -> None:
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


@long.parametrize("form", ["fully_shard", "called"], always=["fully_shard"])
def test_every_call_of_a_sharded_model_trains_it(form: str) -> None:
    run_ranks(_trained_by_another_method, form)


def test_a_compiled_model_that_ddp_averages_instead_is_not_refused() -> None:
    """As scripts do that catch a refusal."""
    with fake_world(2):
        model = Stack()
        compiled = compile_eagerly(model)
        torch.nn.parallel.DistributedDataParallel(model)(torch.ones(2, WIDTH)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        del compiled


def test_a_model_that_is_compiled_first_and_sharded_then_has_no_hooks_of_the_compile() -> None:
    with fake_world(2):
        model = Stack()
        compile_eagerly(model)
        fully_shard(model)
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
