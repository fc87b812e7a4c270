"""Models that reach their parameters, or other models, in unusual ways: as in one process, or refused by name."""

from __future__ import annotations

import abc
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.functional import linear
from torch.nn.utils import parametrizations, parametrize

from fsdp_compile import UnsupportedModelError, fully_shard, step_in_backward
from tests import long
from tests.fake_world import fake_world
from tests.models.kinds import Stack
from tests.models.unusual import KINDS
from tests.numerics.one_process.measure import train_pair
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess, close, compile_eagerly, made, whole

Change = Callable[[nn.Linear], object]


class _Student(nn.Module):
    def __init__(self, teacher: nn.Linear) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.others = [teacher]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.others[0](torch.tanh(self.first(x)))


def _models() -> tuple[_Student, _Student]:
    student, plain = (made(lambda: _Student(nn.Linear(6, 6))) for _ in range(2))
    fully_shard(student.others[0])
    fully_shard(student)
    return student, plain


def _sgd(student: _Student) -> torch.optim.SGD:
    return torch.optim.SGD([*student.first.parameters(), *student.others[0].parameters()], lr=0.5)


def _train(student: _Student, call: Any, plain: _Student) -> None:
    for model, called in ((student, call), (plain, plain)):
        optimizer = _sgd(model)
        for seed in range(4):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            called(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(student.others[0].parameters(), plain.others[0].parameters(), strict=True):
        close(whole(mine), theirs, "parameter")


@on_ranks()
def test_both_are_trained() -> None:
    student, plain = _models()
    _train(student, compile_eagerly(student), plain)
    student, plain = _models()
    step_in_backward(_sgd(student))
    _train(student, compile_eagerly(student), plain)


class _Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    weight = self.head.weight
    # TRL does this for FSDP2: gradients of a tensor that was made so would be averaged by no rank.
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    return linear(self.body(x).relu(), weight, self.head.bias)


def _assign(model: nn.Module) -> None:
    model.forward = types.MethodType(_forward, model)


@long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.SHARDED])
@on_ranks()
def test_reads_of_an_assigned_forward_gather(how: Run) -> None:
    at_once, later = WithOneProcess(_Headed, how), WithOneProcess(_Headed, how)
    at_once.change(_assign)
    for each in (at_once, later):
        each.train(steps=1)
    later.change(_assign)
    for each in (at_once, later):
        each.train()


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class _Counted(abc.ABCMeta):
    def __call__(cls, *args: object, **kwargs: object) -> object:
        made = super().__call__(*args, **kwargs)
        made.was_made = True
        return made


class _Abstract(nn.Linear, abc.ABC):
    """`abc.ABC` brings a metaclass along."""


class _OfAMetaclass(nn.Linear, metaclass=_Counted):
    """Has one of a user's."""


def _parametrized(layer: type[nn.Linear]) -> nn.Module:
    model = _Model()
    model.layer = layer(6, 6)
    parametrizations.weight_norm(model.layer)
    return model


@long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.PLAIN])
@long.parametrize("layer", [nn.Linear, _Abstract, _OfAMetaclass], always=[_OfAMetaclass])
@on_ranks()
def test_it_trains_whatever_the_metaclass(layer: type[nn.Linear], how: Run) -> None:
    pair = WithOneProcess(lambda: _parametrized(layer), how)
    pair.train(steps=3)


class _Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@long.parametrize("how", ["compiled", "function", "uncompiled", "before the first call"], always=["compiled"])
@on_ranks(timeout_s=60)
def test_a_parametrization_of_a_sharded_parameter_is_refused_by_name(how: str) -> None:
    model = fully_shard(_Model())
    compiled: Any = compile_eagerly((lambda x: model(x)) if how == "function" else model)  # noqa: PLW0108
    x = torch.ones(2, 6)
    if how != "before the first call":
        compiled(x).sum().backward()
    parametrize.register_parametrization(model.layer, "weight", _Doubled())
    call = model if how == "uncompiled" else compiled
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=r"parametrized\n  where: (layer|Param.*)\.weight"):
            call(x)


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
        kept = self.layer.weight
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
        self.value = nn.Parameter(torch.eye(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional_call(self.both, {"0.weight": self.value * 2}, (x,))


SWAPPED = [(make, Run.SHARDED) for make in (_FastWeights, _Broken, _Generated, _PutBack, _Tied)]


@long.parametrize(("make", "how"), [*SWAPPED, (_FastWeights, Run.PLAIN)], always=[(_Generated, Run.SHARDED)])
@on_ranks()
def test_compiled_code_reads_values_that_are_swapped_around_it(make: Callable[[], nn.Module], how: Run) -> None:
    """A plain model with functional calls is sharded, and left to Python."""
    WithOneProcess(make, how).train()


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


def _place_in_a_dict(model: _Asks) -> int:
    places: dict[object, int] = {p: place for place, p in enumerate(model.parameters())}
    return places[model.a.weight] + 1


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
    "in a dict": _place_in_a_dict,
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


@long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.PLAIN])
@long.parametrize("name", QUESTIONS, always=["isinstance", "between graphs"])
@on_ranks()
def test_questions_are_answered_as_in_one_process(name: str, how: Run) -> None:
    WithOneProcess(lambda: _Asks(name), how, shape=WIDTH).train(steps=2)


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


# Models of tests/models/unusual.py, and first calls.

LEFT_TO_PYTHON = ("recurrent", "recurrent-first", "experts")
"""No frame of these reaches the backend: they have to be sharded before."""


@pytest.mark.core
@long.parametrize("name", [name for name in KINDS if name not in LEFT_TO_PYTHON], always=["several-dtypes"])
@on_ranks()
def test_sharded_at_the_first_call(name: str) -> None:
    train_pair(KINDS[name])


@pytest.mark.core
@long.parametrize("name", [*LEFT_TO_PYTHON, "penalty-of-blocks"], always=["penalty-of-blocks"])
@on_ranks()
def test_sharded_before_the_compile(name: str) -> None:
    train_pair(KINDS[name], prepare=fully_shard)


@pytest.mark.long
@on_ranks()
def test_through_inductor() -> None:
    train_pair(KINDS["reads-of-another"], lower="inductor")


class ReadEarly(Stack):
    """Reads parameters in code that Dynamo leaves to Python, before its first graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)

    @torch._dynamo.disable
    def early(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.early(x))


@pytest.mark.long
@on_ranks()
def test_parameters_read_before_the_first_graph_get_their_gradients() -> None:
    train_pair(ReadEarly)


@long.parametrize("world_size", [1, 2], always=[2])
@on_ranks(world_size=lambda world_size: world_size)
def test_a_flat_shard_of_one_padded_slot(world_size: int) -> None:
    WithOneProcess(lambda: nn.Linear(6, 7, bias=False), Run.PLAIN, twice=False).train(steps=1)


class _PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, both: str) -> torch.Tensor:
        return self.b(self.a(x)) if both == "both" else self.a(x)


@pytest.mark.long
@on_ranks()
def test_gradients_that_were_never_accumulated_are_forgotten() -> None:
    model = _PartlyUsed()
    compiled = compile_eagerly(model)
    x = torch.ones(2, WIDTH, requires_grad=True)
    torch.autograd.grad(compiled(x, "both").sum(), x)
    compiled(x, "one").sum().backward()
    assert model.a.weight.grad is not None
    assert model.b.weight.grad is None
