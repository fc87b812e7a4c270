"""Text as bytes: what is read, held out and refused, and which windows of it ranks read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fsdp_compile.errors import ConfigError
from fsdp_compile.training.config import TrainConfig
from fsdp_compile.training.data import HELD_OUT_EVERY, USUAL_BLOCK_BYTES, cut, draw_batch, read_corpus

BATCH, SEQ_LEN = 8, 5
BLOCKS = torch.arange(6 * 40, dtype=torch.uint8).view(6, 40)  # every byte names its place


def _draw(rank: int, ranks: int, key: str | int, seed: int = 0) -> tuple[Tensor, Tensor]:
    config = TrainConfig(seed=seed, batch_size=BATCH, seq_len=SEQ_LEN)
    return draw_batch(config, BLOCKS, key, rank=rank, ranks=ranks)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("key", [1, 2, 77, "held-out 0"])
def test_ranks_read_together_what_one_rank_reads_alone(ranks: int, key: str | int) -> None:
    shares = [_draw(rank, ranks, key) for rank in range(ranks)]
    assert {share[0].shape for share in shares} == {(BATCH // ranks, SEQ_LEN)}
    for half, alone in enumerate(_draw(0, 1, key)):
        torch.testing.assert_close(torch.cat([share[half] for share in shares]), alone, rtol=0, atol=0)


@pytest.mark.parametrize("key", [1, 5])
def test_targets_are_the_bytes_after_the_tokens_in_one_block(key: int) -> None:
    tokens, targets = _draw(0, 1, key)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(targets, tokens + 1)  # in these blocks every byte is its predecessor plus one
    assert torch.equal(tokens[:, 0] // 40, targets[:, -1] // 40)


def test_steps_and_seeds_read_different_windows() -> None:
    keys: list[tuple[str | int, int]] = [(1, 0), (2, 0), (1, 1), ("held-out 1", 0)]
    drawn = [_draw(0, 1, key, seed)[0] for key, seed in keys]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_a_block_of_one_window_is_read_from_its_start() -> None:
    tokens, _ = draw_batch(TrainConfig(batch_size=2, seq_len=39), BLOCKS, 1, rank=0, ranks=1)
    assert set((tokens[:, 0] % 40).tolist()) == {0}


def test_every_byte_is_trained_on_or_held_out_never_both() -> None:
    corpus = cut(bytes(range(200)), 4, "here")  # 20 blocks of 10 bytes, each byte names its place
    train, held_out = set(corpus.train.flatten().tolist()), set(corpus.held_out.flatten().tolist())
    assert not train & held_out
    assert train | held_out == set(range(200))
    assert held_out == set(range(100, 110))


@pytest.mark.parametrize(
    ("length", "seq_len", "train", "held_out"),
    [
        (60 * USUAL_BLOCK_BYTES + 1, 256, (57, USUAL_BLOCK_BYTES), (60 // HELD_OUT_EVERY, USUAL_BLOCK_BYTES)),
        (10**6, USUAL_BLOCK_BYTES, (58, USUAL_BLOCK_BYTES + 1), (3, USUAL_BLOCK_BYTES + 1)),  # longer than usual
        (100, 4, (19, 5), (1, 5)),
    ],
)
def test_one_block_in_twenty_is_held_out(
    length: int, seq_len: int, train: tuple[int, int], held_out: tuple[int, int]
) -> None:
    corpus = cut(b"x" * length, seq_len, "here")
    assert (corpus.train.shape, corpus.held_out.shape) == (train, held_out)


def test_a_text_that_is_one_byte_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"99 bytes; sequences of 4 need 100\n.*--data \(here\)"):
        cut(b"x" * 99, 4, "here")


def test_a_folder_is_read_sorted_without_hidden_and_binary_files(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"2" * 99,
        "a/z.txt": b"1" * 99,
        ".git/x": b"4" * 99,
        "c.bin": b"\0" * 99,
        "empty": b"",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    corpus = read_corpus(str(tmp_path), 4)
    read = bytes(torch.cat([corpus.train, corpus.held_out]).flatten().tolist())
    assert sorted(set(read)) == sorted(b"\x0012")
    assert read.startswith(b"1" * 10)
    assert corpus.source == str(tmp_path)


def test_the_fingerprint_is_that_of_the_text(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"ab" * 100)
    first = read_corpus(str(file), 4).fingerprint
    assert read_corpus(str(file), 8).fingerprint == first
    file.write_bytes(b"ab" * 99 + b"ac")
    assert read_corpus(str(file), 4).fingerprint != first


def test_links_that_lead_nowhere_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"x" * 200)
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    assert read_corpus(str(tmp_path), 4).train.numel() == 190


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_bytes(b"x" * 200)

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may read whatever the mode says
    with pytest.raises(ConfigError, match=r"Permission denied: .*text"):
        read_corpus(str(tmp_path), 4)


def test_by_default_the_standard_library_is_read() -> None:
    corpus = read_corpus(None, 256)
    assert "standard library" in corpus.source
    assert corpus.train.numel() > 5_000_000
    assert b"import " in bytes(corpus.held_out.flatten()[:200_000].tolist())
