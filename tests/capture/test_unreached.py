"""Models that Dynamo leaves to Python are refused before a rank trains a copy of its own, however they are reached."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import ConfigError, UnsupportedModelError, fully_shard
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
    first, second = nn.Linear(WIDTH, WIDTH), Recurrent()
    return compile_eagerly(lambda x: second(first(x))), second


REACHED: dict[str, Callable[[], tuple[Call, nn.Module]]] = {
    "closure": _closure,
    "global": _global,
    "argument": _argument,
    "list-of-arguments": _list_of_arguments,
    "method": _method,
    "part-of-an-attribute": _part_of_an_attribute,
    "module": _module,
    "module-of-torch": _torchs_module,
    "module.compile": _module_itself_compiled,
    "one-of-two": _one_of_two,
}


@pytest.mark.core
@pytest.mark.parametrize("way", REACHED)
def test_its_first_backward_is_refused(way: str) -> None:
    with fake_world(2):
        call, model = REACHED[way]()
        with pytest.raises(UnsupportedModelError) as caught:
            call(torch.ones(2, 3, WIDTH)).sum().backward()
    assert "never handed to its backend" in caught.value.what
    assert f"{type(model).__name__}, parameter " in (caught.value.where or "")
    assert "fsdp_compile.fully_shard(model) before torch.compile" in (caught.value.instead or "")


def _updated_by_hand(*, sharded: bool) -> str:
    """A step without an optimizer: refused before the update, or that of one process on the whole batch."""
    torch.manual_seed(0)
    model = Recurrent()
    reference = copy.deepcopy(model)
    if sharded:
        fully_shard(model)
    call = compile_eagerly(lambda x: model(x))  # noqa: PLW0108  a compiled function
    batch = torch.randn(2, 4, WIDTH)
    try:
        loss_of(call(batch.chunk(2, 1)[dist.get_rank()])).backward()
    except UnsupportedModelError as error:
        return error.what
    loss_of(reference(batch)).backward()
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            mine.sub_(0.1 * mine.grad)
            theirs.sub_(0.1 * theirs.grad)
            close(mine.full_tensor(), theirs, "after the update")  # type: ignore[attr-defined]
    return "equal"


@pytest.mark.core
def test_an_update_by_hand() -> None:
    for message in run_ranks(_updated_by_hand, sharded=False):
        assert "never handed to its backend" in message
    assert run_ranks(_updated_by_hand, sharded=True) == ["equal", "equal"]


def _past_the_recompile_limit() -> list[str]:
    """Which models a function with room for two compiles has sharded, or refused."""

    @compile_eagerly
    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    results = []
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in range(3):
            model = type(f"Linear{number}", (nn.Linear,), {})(4, 4)
            try:
                call(model, torch.ones(2, 4)).sum().backward()
                results.append(type(model.weight).__name__)
            except UnsupportedModelError as error:
                results.append(error.what)
    return results


def test_a_model_that_comes_after_the_recompile_limit_is_refused() -> None:
    with fake_world(2):
        *first, last = _past_the_recompile_limit()
    assert first == ["DTensor", "DTensor"]
    assert "never handed to its backend" in last


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
