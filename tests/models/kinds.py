"""Small models, one per thing that a user's model may do; each is trained against a copy of itself in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models.layers import Residual

WIDTH = 32


class Block(Residual):
    """One whose hidden width does not divide over 2 or 4 ranks."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3 * WIDTH + 1)


class Stack(nn.Module):
    """Blocks and a head; with two blocks as much is compiled as a case needs."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class StackOfThree(Stack):
    """With a block that is neither the first nor the last."""

    def __init__(self) -> None:
        super().__init__(3)


class Slim(nn.Module):
    """Blocks and a head that does not divide over 2 or 4 ranks: units of as few nodes as can be."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


class GraphBreaks(StackOfThree):
    """Two graph breaks, one before anything is read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1:
                torch._dynamo.graph_break()
        return self.head(x)


class Checkpointed(Stack):
    """Every block is recomputed in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Uncompiled(StackOfThree):
    """One part is left to Python, which calls modules that graphs call, too."""

    @torch._dynamo.disable
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[1](x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](x)) + self.middle(x) + self.head(self.blocks[2](x))


class Tied(nn.Module):
    """Embedding and head share one parameter; the input is made integer here."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed((x.abs() * 4).long().clamp(max=10)).mean(1)
        for block in self.blocks:
            y = block(y)
        return self.head(y)


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(F.relu(self.layer(x)))


@dataclasses.dataclass
class Output:
    """What a transformers model returns is like this."""

    hidden: torch.Tensor
    logits: torch.Tensor


class ReturnsDataclass(Stack):
    """The output is a dataclass, part of which the loss does not use."""

    def forward(self, x: torch.Tensor) -> Output:  # type: ignore[override]
        hidden = self.blocks[0](x)
        return Output(hidden, self.head(hidden))


class Frozen(StackOfThree):
    """A frozen block, a frozen weight in a trained block, an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(requires_grad=False)
        self.get_parameter("blocks.1.up.weight").requires_grad = False
        self.unused = nn.Parameter(torch.ones(3))


class OddShapes(nn.Module):
    """A 0-d parameter, an empty one, single elements, fewer rows than ranks, a list and a dict of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Linear(WIDTH, 3)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.one = nn.Parameter(torch.ones(1))
        self.list = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for _ in range(2)])
        self.dict = nn.ParameterDict({"u": nn.Parameter(torch.randn(WIDTH))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for p in self.list:
            x = x @ p
        return self.few(x * self.dict["u"]) * self.scale + self.one + self.empty.sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None, :] + x[:, :, None]
        return self.encoder(self.attention(x, x, x)[0])


class Parametrized(nn.Module):
    """A weight that is computed from two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv1d(6, 5, 3), nn.AdaptiveAvgPool1d(1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x[:, None]).flatten(1)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "stack": Stack,
    "graph-breaks": GraphBreaks,
    "checkpointed": Checkpointed,
    "uncompiled": Uncompiled,
    "tied": Tied,
    "repeated": Repeated,
    "dataclass": ReturnsDataclass,
    "frozen": Frozen,
    "odd-shapes": OddShapes,
    "attention": Attention,
    "parametrized": Parametrized,
    "convolution": Convolution,
}
