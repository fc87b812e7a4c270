"""Two copies of a model that torch's FSDP2 has sharded: one compiled by this package, one in eager code."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_compile.backend import fsdp
from fsdp_compile.fsdp2.unit import Unit

WIDTH = 16
VOCABULARY = 50
OPTIONS: dict[str, Any] = {"lower": "eager"}
Loss = Callable[[Any, torch.Tensor], torch.Tensor]
Optimizers = tuple[torch.optim.Optimizer, torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 2 * WIDTH)
        self.b = nn.Linear(2 * WIDTH, WIDTH)
        self.n = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu(self.a(self.n(x))))


class Decoder(nn.Module):
    """An embedding, blocks, a norm that is in the unit of the root, and a head."""

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


class Tied(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight


def shard(model: nn.Module, **settings: Any) -> None:
    """Calls torch's `fully_shard` on the blocks, the embedding, the head and the rest."""
    assert isinstance(model, Decoder)
    for block in model.blocks:
        fully_shard(block, **settings)
    if model.head.weight is model.embedding.weight:
        fully_shard([model.embedding, model.head], **settings)
    else:
        fully_shard(model.embedding, **settings)
        fully_shard(model.head, **settings)
    fully_shard(model, **settings)


@dataclasses.dataclass
class Pair:
    """A model, and the same in eager code."""

    model: Any
    reference: Any

    @staticmethod
    def of(
        make: Callable[[], nn.Module] = Decoder,
        prepare: Callable[[Any], object] = id,
        sharded: Callable[..., object] = shard,
        **settings: Any,
    ) -> Pair:
        torch.manual_seed(0)
        model = make()
        pair = Pair(model, copy.deepcopy(model))
        for each in (pair.model, pair.reference):
            prepare(each)
            sharded(each, **settings)
        return pair

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.reference))

    def compiled(self, *, fullgraph: bool = True) -> Any:
        return torch.compile(self.model, backend=fsdp, options=OPTIONS, fullgraph=fullgraph)

    def train(
        self,
        ours: Any,
        theirs: Any = None,
        *,
        steps: int = 2,
        start: int = 0,
        optimizers: Optimizers | None = None,
        loss: Loss | None = None,
        exact: bool = True,
    ) -> Optimizers:
        """Some steps of both; losses and gradients are compared in each, parameters after the last."""
        theirs, loss = self.reference if theirs is None else theirs, loss or cross_entropy
        mine, other = optimizers or (adamw(self.model), adamw(self.reference))
        for step in range(start, start + steps):
            a, b = loss(ours, batch(step)), loss(theirs, batch(step))
            a.backward()
            b.backward()
            assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-5), f"losses of step {step}: {a} {b}"
            self.compare_grads(exact=exact)
            for optimizer in (mine, other):
                optimizer.step()
                optimizer.zero_grad()
        self.compare_parameters(exact=exact)
        return mine, other

    def compare_grads(self, *, exact: bool = True) -> None:
        self._compare("gradients", lambda p: p.grad, exact=exact)

    def compare_parameters(self, *, exact: bool = True) -> None:
        self._compare("parameters", lambda p: p, exact=exact, tolerance=1e-3)

    def _compare(self, what: str, of: Callable[[nn.Parameter], Any], *, exact: bool, tolerance: float = 1e-6) -> None:
        theirs = dict(self.reference.named_parameters())
        differ = [
            name
            for name, p in self.model.named_parameters()
            if not _is_same(of(p), of(theirs[name]), exact=exact, tolerance=tolerance)
        ]
        assert not differ, f"{what} differ: {differ}"

    def backward(self, ours: Any, theirs: Any = None, step: int = 0) -> None:
        cross_entropy(ours, batch(step)).backward()
        cross_entropy(self.reference if theirs is None else theirs, batch(step)).backward()

    def zero_grad(self) -> None:
        for each in self:
            each.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def batch(step: int, shape: tuple[int, int] = (2, 5)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 100 + dist.get_rank())
    return torch.randint(0, VOCABULARY, shape, generator=generator)


def cross_entropy(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_same(a: Any, b: Any, *, exact: bool, tolerance: float) -> bool:
    if a is None or b is None:
        return a is b
    a, b = local(a.detach()), local(b.detach())
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-4, atol=tolerance)


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


Case = Callable[[], None]


def run_cases(cases: dict[str, Case], names: list[str]) -> dict[str, str]:
    """Runs some cases on this rank; returns what went wrong in which."""
    import traceback

    failed = {}
    for name in names:
        torch.compiler.reset()
        torch.manual_seed(0)
        try:
            cases[name]()
        except Exception:
            failed[name] = traceback.format_exc(limit=-6)
    return failed
