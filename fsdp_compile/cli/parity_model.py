"""The model that `fsdp-compile parity` trains when none is named: a small Llama over bytes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compile.training.model import VOCABULARY, Llama, ModelShape

_SHAPE = ModelShape(width=64, layers=3, heads=4, seq_len=32)
_ROWS = 16


class _LanguageModel(nn.Module):
    """A `Llama` that returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = Llama(_SHAPE)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of the next byte, in nats."""
        return F.cross_entropy(self.llama(tokens).flatten(0, 1).float(), targets.flatten())


def make_model() -> nn.Module:
    """A language model of 130 thousand parameters."""
    return _LanguageModel()


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Random bytes and those that follow them, `[16, 32]` each."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, VOCABULARY, (_ROWS, _SHAPE.seq_len + 1), generator=generator)
    return text[:, :-1], text[:, 1:]
