"""Drawn models and options: a short text that says the whole training, and shrinks to a shorter one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Literal

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_compile.parity.experiment import Experiment, Level, Reference
from tests.models.matrix import WIDTH, Block, make_batch
from tests.numerics.fsdp2.matrix import ACCUMULATIONS, PRECISIONS, STRATEGIES

WORLD_SIZE = 2


class Layer(StrEnum):
    """What a drawn model is made of; from `[rows, 16]` to `[rows, 16]` all of them."""

    LINEAR = "linear"
    GELU = "gelu"
    NORM = "norm"
    RESIDUAL = "residual"
    """A block with a norm and two linear layers, added to its input."""
    UNEVEN = "uneven"
    """A residual block whose hidden width does not divide over the ranks."""
    RECOMPUTED = "recomputed"
    """A residual block that backward computes again."""
    FROZEN = "frozen"
    """A linear layer that is not trained."""
    SHARED = "shared"
    """One and the same linear layer at every place."""
    TIED = "tied"
    """Linear layers with biases of their own and one weight."""
    SKIPPED = "skipped"
    """A linear layer that is never called."""


class _Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class _Skipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Model(nn.Module):
    def __init__(self, layers: tuple[Layer, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        first: dict[Layer, nn.Module] = {}
        for kind in layers:
            layer = _MAKERS[kind]()
            if kind is Layer.SHARED:
                layer = first.setdefault(kind, layer)
            if kind is Layer.TIED:
                layer.weight = first.setdefault(kind, layer).weight
            self.layers.append(layer)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class _Gelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


_MAKERS: dict[Layer, Callable[[], nn.Module]] = {
    Layer.LINEAR: _linear,
    Layer.GELU: _Gelu,
    Layer.NORM: lambda: nn.LayerNorm(WIDTH),
    Layer.RESIDUAL: Block,
    Layer.UNEVEN: lambda: Block(2 * WIDTH + 1),
    Layer.RECOMPUTED: _Recomputed,
    Layer.FROZEN: lambda: _linear().requires_grad_(requires_grad=False),
    Layer.SHARED: _linear,
    Layer.TIED: _linear,
    Layer.SKIPPED: _Skipped,
}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A model and how it is trained.

    Attributes:
        layers: One after the other; a linear head follows.
        strategy: Key of `STRATEGIES[2]`.
        precision: Key of `PRECISIONS`.
        accumulation: Key of `ACCUMULATIONS`.
        prefetch: As in `FSDPOptions`.
        units: Chosen by `fully_shard`, or one for each layer.
    """

    layers: tuple[Layer, ...]
    strategy: str = "full"
    precision: str = "fp32"
    accumulation: str = "no accumulation"
    prefetch: int | Literal["auto"] = 1
    units: Literal["chosen", "each layer"] = "chosen"

    def __repr__(self) -> str:
        options = [getattr(self, field.name) for field in dataclasses.fields(self)[1:-2]]
        return f"[{' '.join(self.layers)}] {', '.join(options)}, prefetch {self.prefetch}, units {self.units}"

    def make_model(self) -> nn.Module:
        return _Model(self.layers)

    def prepare(self, model: nn.Module, fully_shard: Callable[..., nn.Module]) -> None:
        """Shards layer by layer."""
        inner = dataclasses.replace(PRECISIONS[self.precision], cast_forward_inputs=False)
        reshard = STRATEGIES[WORLD_SIZE][self.strategy].reshard
        for layer in _with_parameters(model.layers):  # type: ignore[arg-type]
            fully_shard(layer, mp_policy=inner, reshard_after_forward=reshard)
        fully_shard(model, mp_policy=PRECISIONS[self.precision], reshard_after_forward=reshard)

    def experiment(self) -> Experiment:
        """The comparison with one process on the whole batch."""
        micro_batches, accumulation = ACCUMULATIONS[self.accumulation]
        strategy = STRATEGIES[WORLD_SIZE][self.strategy]
        return Experiment(
            make_model=self.make_model,
            make_batch=make_batch,
            world_size=WORLD_SIZE,
            reference=Reference.SINGLE,
            level=Level.TOLERANCE,
            steps=2,
            options={"lower": "eager", "prefetch": self.prefetch},
            mp_policy=PRECISIONS[self.precision],
            reshard_after_forward=strategy.reshard,
            replicas=strategy.replicas,
            prepare=self.prepare if self.units == "each layer" else None,
            micro_batches=micro_batches,
            accumulation=accumulation,
        )


def _with_parameters(layers: nn.ModuleList) -> Iterator[nn.Module]:
    for layer in dict.fromkeys(layers):
        if any(True for _ in layer.parameters()):
            yield layer


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Any of them; the first choice of each is the simplest."""

    def one_of(choices: Any) -> Any:
        return draw(st.sampled_from(list(choices)))

    precision = one_of(PRECISIONS)
    layers = draw(st.lists(st.sampled_from(list(Layer)), min_size=1, max_size=5))
    units = one_of(["chosen", "each layer"])
    # Layer by layer they are sharded over the default mesh.
    strategy = one_of(["full", "ZeRO-2"] if units == "each layer" else STRATEGIES[WORLD_SIZE])
    return Drawn(tuple(layers), strategy, precision, one_of(ACCUMULATIONS), one_of([1, 0, 2, "auto"]), units)
