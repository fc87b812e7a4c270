"""A decoder that torch's FSDP2 shards, beside itself in eager code, and the programs that are run with both."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_compile import backend
from fsdp_compile.fsdp2.unit import Unit
from fsdp_compile.ir.graph import Phase, StepGraph
from fsdp_compile.progress import LOGGER
from tests.two_sides import Loss, WithFsdp2, Within, compile_eagerly

WIDTH = 16
VOCABULARY = 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 2 * WIDTH)
        self.b = nn.Linear(2 * WIDTH, WIDTH)
        self.n = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu(self.a(self.n(x))))


class Decoder(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([self.block() for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.norm(self.hidden(tokens)))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class Deep(Decoder):
    """Of four blocks, of which some can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.block() for _ in range(4)])
        self.left_out: set[int] = set()

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = x if number in self.left_out else self.call(block, x)
        return x

    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)


class Tied(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight


def shard(model: nn.Module, **settings: Any) -> None:
    assert isinstance(model, Decoder)
    for block in model.blocks:
        fully_shard(block, **settings)
    if model.head.weight is model.embedding.weight:
        fully_shard([model.embedding, model.head], **settings)
    else:
        fully_shard(model.embedding, **settings)
        fully_shard(model.head, **settings)
    fully_shard(model, **settings)


def shard_lists(model: Any, **settings: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard([model.norm, model.head], **settings)
    fully_shard(model, **settings)


def batch(step: int, shape: tuple[int, int] = (2, 5)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 100 + dist.get_rank())
    return torch.randint(0, VOCABULARY, shape, generator=generator)


def cross_entropy(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def pair_of(
    make: Callable[[], nn.Module] = Decoder,
    prepare: Callable[[Any], object] = id,
    sharded: Callable[..., object] = shard,
    loss: Loss = cross_entropy,
    **settings: Any,
) -> WithFsdp2:
    def prepared(model: Any) -> None:
        prepare(model)
        sharded(model, **settings)

    return WithFsdp2(make, prepared, batch, loss)


def by_blocks(pair: WithFsdp2, **options: Any) -> WithFsdp2:
    pair.compiled(fullgraph=False, regions="blocks", **options)
    return pair


@contextlib.contextmanager
def progress_lines(level: int = logging.INFO) -> Iterator[list[str]]:
    """What the package says of its progress in the block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    before = LOGGER.level
    LOGGER.setLevel(level)
    try:
        yield lines
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before)


@contextlib.contextmanager
def gathered_by_hooks() -> Iterator[list[str]]:
    """The units that FSDP2's hooks gather in the block, once for each time."""
    titles: list[str] = []
    begin = Unit.begin_hooks

    def noted(unit: Unit) -> None:
        titles.append(unit.title)
        begin(unit)

    with mock.patch.object(Unit, "begin_hooks", noted):
        yield titles


def through_a_function(pair: WithFsdp2) -> tuple[Any, Loss]:
    """A compiled function over the model, and a loss of both sides that calls it for the model."""
    model = pair.model
    step = compile_eagerly(lambda tokens: cross_entropy(model, tokens), fullgraph=True)
    return step, lambda each, tokens: step(tokens) if each is model else cross_entropy(each, tokens)


@contextlib.contextmanager
def compiled_graphs(*phases: Phase) -> Iterator[list[StepGraph]]:
    """The graphs of some phases that are compiled in the block, after their passes."""
    found: list[StepGraph] = []
    transform = backend.transform

    def noted(step: StepGraph, *args: Any, **kwargs: Any) -> Any:
        made = transform(step, *args, **kwargs)
        if step.phase in phases:
            found.append(step)
        return made

    with mock.patch.object(backend, "transform", noted):
        yield found


Case = Callable[[], None]
GROUPS: dict[str, dict[str, Case]] = {}


def case(group: str, *, is_long: bool = False) -> Callable[[Case], Case]:
    """A program that runs its model compiled, and FSDP2's eager code beside it; long ones are a group of their own."""

    def add(function: Case) -> Case:
        GROUPS.setdefault(f"more_{group}" if is_long else group, {})[function.__name__] = function
        return function

    return add


def trained(make: Callable[[], nn.Module] = Decoder) -> WithFsdp2:
    """After one step of the compiled model."""
    pair = pair_of(make)
    pair.compiled()
    pair.train(steps=1)
    return pair


def whole(pair: WithFsdp2) -> Any:
    """The model, compiled into one graph."""
    return pair.compiled() if pair.call is pair.model else pair.call


def in_parts(pair: WithFsdp2) -> Any:
    """The model, compiled into as many graphs as its breaks make."""
    return pair.compiled(fullgraph=False) if pair.call is pair.model else pair.call


def uncompiled(pair: WithFsdp2) -> Any:
    return pair.model


def trains(
    group: str,
    name: str,
    make: Callable[[], nn.Module] = Decoder,
    *forms: Callable[[WithFsdp2], Any],
    is_long: bool = False,
    steps: int = 2,
    within: Within | None = None,
    **how: Any,
) -> None:
    """Adds a case that trains a model in each of some forms, one after the other.

    Args:
        group: As in `case`.
        name: Of the case.
        make: Makes the model.
        forms: By default `whole`.
        is_long: As in `case`.
        steps: In each form.
        within: As in `Sides.train`.
        how: Others of `pair_of`.
    """

    def run() -> None:
        pair = pair_of(make, **how)
        for form in forms or (whole,):
            pair.train(form(pair), steps=steps, within=within)

    run.__name__ = name
    case(group, is_long=is_long)(run)


def with_blocks(block: type[nn.Module]) -> type[Decoder]:
    return type("Model", (Decoder,), {"block": block})
