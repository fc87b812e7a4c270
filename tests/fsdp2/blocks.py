"""A decoder whose blocks are compiled one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_compile.fsdp2.take_over import model_of
from tests.fsdp2.decoder import Decoder
from tests.two_sides import WithFsdp2


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


def by_blocks(pair: WithFsdp2, **options: Any) -> WithFsdp2:
    pair.compiled(fullgraph=False, regions="blocks", **options)
    return pair


def pipeline_of(pair: WithFsdp2) -> Any:
    taken = model_of(pair.model)
    assert taken is not None
    return taken.pipeline
