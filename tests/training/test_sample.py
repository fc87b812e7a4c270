"""Text that a model writes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compile.training.config import TrainConfig
from fsdp_compile.training.model import generate


class NextLetter(nn.Module):
    """Expects the byte after the last one, and notes how long its texts were."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.lengths.append(tokens.shape[1])
        return 9.0 * F.one_hot((tokens + 1) % 256, 256).float()


def _write(model: nn.Module, prompt: str, **changes: float) -> str:
    settings: Any = {"sample_bytes": 4, "seq_len": 3, "temperature": 0.0} | changes
    return generate(model, TrainConfig(prompt=prompt, **settings), torch.device("cpu"))


def test_takes_the_likeliest_byte_at_temperature_zero() -> None:
    assert _write(NextLetter(), "ab") == "abcdef"
    assert _write(NextLetter(), "ab", temperature=1e-39) == "abcdef"  # logits over it are beyond float32


def test_the_model_sees_no_more_than_it_takes() -> None:
    model = NextLetter()
    _write(model, "ab")
    assert model.lengths == [2, 3, 3, 3]


def test_the_seed_decides_the_dice() -> None:
    hot = [_write(NextLetter(), "ab", sample_bytes=20, temperature=5.0, seed=seed) for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    written = _write(NextLetter(), "~", sample_bytes=3)
    assert written == "~\x7f\ufffd\ufffd"
    assert written.encode().decode() == written


def test_a_prompt_that_the_shell_could_not_decode_is_continued_byte_by_byte() -> None:
    assert _write(NextLetter(), b"\xff`".decode(errors="surrogateescape"), sample_bytes=1) == "\ufffd`a"


def test_nothing_is_added_where_nothing_is_wanted() -> None:
    assert _write(NextLetter(), "ab", sample_bytes=0) == "ab"


class _Broken(NextLetter):
    """Not a number after the third byte."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (float("nan") if len(self.lengths) == 2 else 1.0)


def test_text_ends_where_the_model_is_not_finite() -> None:
    for temperature in (0.0, 1.0):
        assert len(_write(_Broken(), "ab", temperature=temperature)) == 3
