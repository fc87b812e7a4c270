"""What a forward finds out about its parameters besides their values is what it is in one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fsdp_compile import fully_shard
from tests import long
from tests.fake_world import fake_world
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import Run, WithOneProcess, compile_eagerly

WIDTH = 6


class _Asks(nn.Module):
    """Multiplies what it computes by a number that depends on the answer to a question about its parameters."""

    def __init__(self, question: str) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.eye(WIDTH))
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight
        self.question = question

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x @ self.own)) * QUESTIONS[self.question](self)


def _after_a_break(model: _Asks) -> int:
    weight = model.own
    torch._dynamo.graph_break()
    return 2 if isinstance(weight, nn.Parameter) else 1


def _between_graphs(model: _Asks) -> int:
    answers = 0
    for _ in range(2):  # Dynamo leaves the whole frame to Python
        torch._dynamo.graph_break()
        answers += isinstance(model.own, nn.Parameter) and model.a.weight is model.b.weight
    return answers


def _ids_with_reads_between(model: _Asks) -> int:
    places = {id(p): place for place, p in enumerate(model.parameters())}
    others = [model.own * 1, model.a.bias * 1]  # memory of an object that was freed would be taken again
    return 1 + places[id(model.a.weight)] + len(others)


def _key_of_a_kept_read(model: _Asks) -> int:
    own, bias = model.own, model.a.bias
    places = {own: 1, bias: 2}
    return 2 if model.own in places else 1


QUESTIONS: dict[str, Callable[[_Asks], int]] = {
    "isinstance": lambda m: 2 if isinstance(m.own, nn.Parameter) else 1,
    "isinstance, of a result": lambda m: 2 if isinstance(m.own * 1, nn.Parameter) else 1,
    "isinstance, of data": lambda m: 2 if isinstance(m.own.data, nn.Parameter) else 1,
    "itself": lambda m: 2 if m.own is m.own else 1,
    "tied": lambda m: 2 if m.a.weight is m.b.weight else 1,
    "not tied": lambda m: 2 if m.a.bias is m.b.bias else 1,
    "in a list": lambda m: 2 if any(p is m.own for p in m.parameters()) else 1,
    "in a set": lambda m: len({m.a.weight, m.b.weight, m.a.bias, m.b.bias}),
    "in a set of all": lambda m: 2 if m.own in set(m.parameters()) else 1,
    "in a dict": lambda m: dict[object, int](zip(m.parameters(), range(9), strict=False))[m.a.weight] + 1,
    "a read before others": _key_of_a_kept_read,
    "ids": _ids_with_reads_between,
    "how many ids": lambda m: len({id(p) for p in m.parameters()}),
    "how many": lambda m: len(list(m.parameters())),
    "how many places": lambda m: len(list(m.named_parameters(remove_duplicate=False))),
    "how many of its own": lambda m: len(list(m.parameters(recurse=False))),
    "names": lambda m: sum(len(name) for name, _ in m.named_parameters(prefix="prefix")) % 5 + 1,
    "after a graph break": _after_a_break,
    "between graphs": _between_graphs,
    "type": lambda m: 2 if type(m.own) is nn.Parameter else 1,
}


def _check_answers(names: list[str], how: Run) -> None:
    for name in names:
        pair = WithOneProcess(lambda name=name: _Asks(name), how, shape=WIDTH)  # type: ignore[misc]
        pair.train(steps=2)


@long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.PLAIN])
@long.parametrize("name", QUESTIONS, always=["isinstance", "in a set", "between graphs"])
def test_questions_are_answered_as_in_one_process(name: str, how: Run) -> None:
    run_ranks(_check_answers, [name], how)


@on_ranks()
def test_parameters_are_frozen_and_thawed_that_a_forward_iterates_over() -> None:
    pair = WithOneProcess(lambda: _Asks("how many"), Run.PLAIN, shape=WIDTH)
    for trainable in (True, False, True):
        pair.change(lambda model, trainable=trainable: model.a.requires_grad_(requires_grad=trainable))  # type: ignore[misc]
        pair.train(steps=1)


class _Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.layer = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), self.own


def test_a_returned_parameter_is_one_for_the_caller_and_gets_its_gradient() -> None:
    with fake_world(2):
        model = fully_shard(_Returns())
        for call in (model, compile_eagerly(model)):
            output, weight = call(torch.ones(2, WIDTH))
            assert isinstance(weight, nn.Parameter)
            assert weight.requires_grad
            (output * weight).sum().backward()
            assert model.own.grad is not None
            model.zero_grad()


@torch.compile(backend="fsdp", options={"lower": "eager"})
def _compiled_elsewhere(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x * weight).sum()


def test_compiled_code_takes_a_gathered_parameter() -> None:
    with fake_world(2):
        model = fully_shard(_Returns())
        for call in (model, compile_eagerly(model)):
            for _ in range(2):  # the second time there are gradients, which compilers ask their inputs for
                _compiled_elsewhere(*call(torch.ones(2, WIDTH))).backward()
            assert model.own.grad is not None
            model.zero_grad()
