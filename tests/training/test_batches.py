"""Which windows of text ranks read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp_compile.training.data import Batches

BATCH, SEQ_LEN = 8, 5
BLOCKS = torch.arange(6 * 40, dtype=torch.uint8).view(6, 40)  # every byte names its place


def _draw(rank: int, ranks: int, key: str | int, seed: int = 0) -> tuple[Tensor, Tensor]:
    stream = Batches(seed=seed, batch_size=BATCH, seq_len=SEQ_LEN, rank=rank, ranks=ranks)
    return stream.draw(BLOCKS, key)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("key", [1, 2, 77, "held-out 0"])
def test_ranks_read_together_what_one_rank_reads_alone(ranks: int, key: str | int) -> None:
    shares = [_draw(rank, ranks, key) for rank in range(ranks)]
    assert {share[0].shape for share in shares} == {(BATCH // ranks, SEQ_LEN)}
    for half, alone in enumerate(_draw(0, 1, key)):
        torch.testing.assert_close(torch.cat([share[half] for share in shares]), alone, rtol=0, atol=0)


def test_a_step_reads_the_same_whatever_was_read_before_it() -> None:
    """A resumed run makes a new stream and starts in its middle."""
    uninterrupted = Batches(seed=3, batch_size=BATCH, seq_len=SEQ_LEN, rank=1, ranks=2)
    for step in range(1, 5):
        expected = uninterrupted.draw(BLOCKS, step)
    resumed = _draw(1, 2, 4, seed=3)
    assert all(torch.equal(*pair) for pair in zip(resumed, expected, strict=True))


def test_targets_are_the_bytes_after_the_tokens() -> None:
    tokens, targets = _draw(0, 1, 1)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(targets, tokens + 1)  # in these blocks every byte is its predecessor plus one


def test_no_window_crosses_from_one_block_into_the_next() -> None:
    tokens, targets = _draw(0, 1, 5)
    assert torch.equal(tokens[:, 0] // 40, targets[:, -1] // 40)


def test_steps_and_seeds_read_different_windows() -> None:
    keys: list[tuple[str | int, int]] = [(1, 0), (2, 0), (1, 1), ("held-out 1", 0)]
    drawn = [_draw(0, 1, key, seed)[0] for key, seed in keys]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_a_block_of_one_window_is_read_from_its_start() -> None:
    stream = Batches(seed=0, batch_size=2, seq_len=39, rank=0, ranks=1)
    tokens, _ = stream.draw(BLOCKS, 1)
    assert set((tokens[:, 0] % 40).tolist()) == {0}
