"""Compiled code would find no gradients: what asks for them is left to Python or refused, other reads are neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import fsdp_compile
from fsdp_compile import UnsupportedModelError, fully_shard
from fsdp_compile.capture import reject_gradient_reads
from tests import long
from tests.beside import Beside, Run, close, compile_eagerly, loss_of
from tests.fake_world import fake_world
from tests.ranks import run_ranks


class _Model(nn.Module):
    """One whose forward asks a parameter for nothing but its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)) / self.first.weight.shape[0]


@pytest.mark.parametrize(
    "step",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda model: model.zero_grad(),
        lambda model: sum(p.grad is None for p in model.parameters()),
    ],
    ids=["clip", "zero_grad", "grad"],
)
def test_what_asks_for_gradients_in_one_graph_is_refused_with_its_line(step: Callable[[nn.Module], object]) -> None:
    with fake_world(2):
        model = fully_shard(_Model())
        model(torch.ones(2, 4)).sum().backward()
        function = torch.compile(lambda: step(model), backend="fsdp", options={"lower": "eager"}, fullgraph=True)
        with pytest.raises(BackendCompilerFailed, match=r"it would find no gradients|has no gradient") as caught:
            function()
        assert "test_reject_gradient_reads.py" in str(caught.value.inner_exception)
        assert all(p.grad is not None for p in model.parameters())


def _step_of(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> torch.Tensor:
    """What a script compiles whole."""
    model.zero_grad()
    loss_of(model(batch)).backward()
    missing = sum(p.grad is None for p in model.parameters())
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if optimizer is not None:
        optimizer.step()
    return norm + missing


def _clips_in_a_compiled_step(how: Run) -> None:
    pair = Beside(_Model, how)
    world, rank = dist.get_world_size(), dist.get_rank()
    mine, theirs = (torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9) for model in pair.both())
    step = compile_eagerly(_step_of)
    for number in range(3):
        batch = torch.randn(2 * world, 4, generator=torch.Generator().manual_seed(number))
        # An optimizer that was made before its parameters were sharded cannot step in compiled code.
        norm = step(pair.model, batch.chunk(world)[rank], mine if how is Run.SHARDED else None)
        if how is Run.PLAIN:
            mine.step()
        close(norm.full_tensor(), _step_of(pair.reference, batch, theirs), "norm")  # type: ignore[attr-defined]
    pair.compare()


@long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.PLAIN])
def test_a_compiled_step_finds_gradients_where_python_runs_it(how: Run) -> None:
    run_ranks(_clips_in_a_compiled_step, how)


def _of_all(model: nn.Module) -> int:
    return sum(p.grad is None for p in model.parameters())


def _of_each(model: nn.Module) -> int:
    count = 0
    for parameter in model.parameters():
        if parameter.grad is None:
            count += 1
    return count


def _of_one_in_use(model: Any) -> torch.Tensor:
    weight = model.first.weight
    gradient = weight.grad
    return weight.sum() if gradient is None else gradient.sum()


def _without_gradients(model: Any) -> int:
    with torch.no_grad():
        return 1 if model.first.weight.grad is None else 2


def _after_a_break(model: Any) -> int:
    torch._dynamo.graph_break()
    return 1 if model.first.weight.grad is None else 2


class _AsksForGradients(_Model):
    def __init__(self, ask: Callable[[nn.Module], int | torch.Tensor]) -> None:
        super().__init__()
        self.ask: Callable[[nn.Module], int | torch.Tensor] = lambda _: 1
        self.later = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.ask(self)


_QUESTIONS = [_of_all, _of_each, _of_one_in_use, _without_gradients, _after_a_break]


@pytest.mark.parametrize("how", [Run.SHARDED, Run.EAGER])
@pytest.mark.parametrize("ask", _QUESTIONS)
def test_gradients_that_a_forward_asks_for_are_refused(
    ask: Callable[[nn.Module], int | torch.Tensor], how: Run
) -> None:
    with fake_world(2):
        model = fully_shard(_AsksForGradients(ask))
        call: Any = compile_eagerly(model) if how is Run.SHARDED else model
        call(torch.ones(2, 4)).sum().backward()
        model.ask = model.later
        with pytest.raises(Exception, match=r"\.grad") as caught:
            call(torch.ones(2, 4))
        error = getattr(caught.value, "inner_exception", caught.value)
        assert isinstance(error, UnsupportedModelError)
        if how is Run.SHARDED:
            assert f"{ask.__name__}" in (error.where or "")
        elif ask is not _of_one_in_use:  # which branches
            model.zero_grad()
            call(torch.ones(2, 4))  # there are none, as in one process


class _HasGradientsElsewhere(_Model):
    """Computes gradients of inputs in a forward, which reads a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.own + torch.func.grad(lambda y: y.square().sum())(x))


def test_functions_that_compute_gradients_are_not_refused() -> None:
    with fake_world(2):
        model: Any = fully_shard(_HasGradientsElsewhere())
        compile_eagerly(model)(torch.ones(2, 4)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


class _NamesThemGrad(_Model):
    """Calls functions whose names begin with `grad`, or are it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(4))
        self.gradient = 2.0

    def grad(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.own

    def grad_norm(self) -> torch.Tensor:
        return self.own.norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.grad(x) + self.own) * self.grad_norm() * self.gradient


def test_names_of_functions_are_no_gradients() -> None:
    with fake_world(2):
        model: Any = fully_shard(_NamesThemGrad())
        compile_eagerly(model)(torch.ones(2, 4)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


class _AsksForIds(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = {id(p): place for place, p in enumerate(self.parameters())}
        return super().forward(x) * places.get(id(self.first.weight), 7)


def test_ids_of_parameters_are_refused_where_one_graph_was_asked_for() -> None:
    with fake_world(2):
        model: Any = fully_shard(_AsksForIds())
        compiled = torch.compile(model, backend="fsdp", fullgraph=True, options={"lower": "eager"})
        with pytest.raises(BackendCompilerFailed, match=r"(?s)calls id\(\).*in forward.*is other\.weight"):
            compiled(torch.ones(2, 4))


def test_a_file_is_parsed_once() -> None:
    reject_gradient_reads._functions.cache_clear()
    with fake_world(2):
        for _ in range(3):
            model: Any = fully_shard(_Model())
            compile_eagerly(model)(torch.ones(2, 4))
    assert reject_gradient_reads._functions.cache_info().misses == 1


def test_a_step_that_reads_gradients_of_inputs_is_not_refused() -> None:
    with fake_world(2):
        model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))

        def step(x: torch.Tensor) -> torch.Tensor | None:
            model(x).sum().backward()
            return x.grad

        assert compile_eagerly(step)(torch.ones(2, 4, requires_grad=True)) is not None
        assert all(p.grad is not None for p in model.parameters())


def test_other_reads_in_compiled_code_are_not_refused() -> None:
    with fake_world(2):
        model: Any = fully_shard(_Model())

        def penalized(x: torch.Tensor) -> torch.Tensor:
            return model(x).sum() + sum(p.square().sum() for p in model.parameters())

        loss = compile_eagerly(penalized)(torch.ones(2, 4))
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())


class _ClearsItsGradient(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first.weight.grad = None
        return super().forward(x)


def _accumulates(how: Run) -> None:
    """Of one parameter, the last backward's gradients are all that there is."""
    pair = Beside(_ClearsItsGradient, how)
    for _ in range(2):
        pair.backward(width=4)
    pair.compare()


def test_a_forward_may_clear_a_gradient() -> None:
    run_ranks(_accumulates, Run.EAGER)


class _SetsAGradient(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first.weight.grad = torch.zeros(4, 4)
        return super().forward(x)


def test_other_writes_of_gradients_in_a_forward_are_refused() -> None:
    with fake_world(2):
        with pytest.raises(UnsupportedModelError, match=r"assigns to the \.grad of a parameter"):
            fully_shard(_SetsAGradient())(torch.ones(2, 4))
        waiting: Any = fully_shard(_ClearsItsGradient())
        with fsdp_compile.no_sync(waiting):
            waiting(torch.ones(2, 4)).sum().backward()
            with pytest.raises(UnsupportedModelError, match="waits for the rest of its reduction"):
                waiting(torch.ones(2, 4))
