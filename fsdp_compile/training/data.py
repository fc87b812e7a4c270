"""Text as bytes: which parts are held out, and which windows each step reads, by seed, step and rank alone."""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fsdp_compile.errors import ConfigError

LARGEST_BLOCK_BYTES = 16384
HELD_OUT_EVERY = 20
"""One block in so many is held out, so held-out text comes from every part of the corpus."""
_FILE_END = b"\0"
_NO_TEXT_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class Corpus:
    """Text cut into blocks of one length, some for training and some held out.

    Attributes:
        train: uint8 (blocks, block bytes), read by training steps.
        held_out: uint8 (blocks, block bytes), never trained on.
        source: Where the text came from, for people.
        fingerprint: Hash of the text, to notice that it changed.
    """

    train: Tensor
    held_out: Tensor
    source: str
    fingerprint: str

    @property
    def size_bytes(self) -> int:
        """Bytes of text that are used."""
        return self.train.numel() + self.held_out.numel()


def read_corpus(data: str | None, seq_len: int) -> Corpus:
    """Read a file, a folder, or the source text of Python's standard library.

    Args:
        data: Path of a file or folder; None for the standard library of the running Python.
        seq_len: Tokens per sequence, to refuse a text that is too short.

    Returns:
        The text; the same for the same files, whatever order the file system lists them in.

    Raises:
        ConfigError: The path does not exist, cannot be read, has no text, or too little.
    """
    if data is None:
        folder = Path(sysconfig.get_path("stdlib"))
        files: Iterable[Path] = _source_files(folder)
        source = f"source of Python's standard library in {folder}"
    else:
        files = _text_files(Path(data))
        source = data
    return cut(b"".join(_contents(files)), seq_len, source)


def cut(text: bytes, seq_len: int, source: str) -> Corpus:
    """Cut text into blocks and hold out every `HELD_OUT_EVERY`th.

    Args:
        text: All of it.
        seq_len: Tokens per sequence: a block has one sequence and the byte after it.
        source: Where the text came from, for people.

    Raises:
        ConfigError: There are too few bytes for `HELD_OUT_EVERY` blocks.
    """
    block_bytes = min(LARGEST_BLOCK_BYTES, len(text) // HELD_OUT_EVERY)
    if block_bytes < seq_len + 1:
        needed = HELD_OUT_EVERY * (seq_len + 1)
        raise ConfigError(
            f"the text has {len(text)} bytes; sequences of {seq_len} need {needed}"
            if seq_len < LARGEST_BLOCK_BYTES
            else f"sequences of {seq_len} bytes are longer than a block of text ({LARGEST_BLOCK_BYTES})",
            where=f"--data ({source}), --seq-len",
            instead="a longer text or shorter sequences",
        )
    usable = len(text) // block_bytes * block_bytes
    blocks = torch.frombuffer(bytearray(text[:usable]), dtype=torch.uint8).view(-1, block_bytes)
    held = torch.arange(len(blocks)) % HELD_OUT_EVERY == HELD_OUT_EVERY // 2
    return Corpus(blocks[~held], blocks[held], source, hashlib.sha256(text).hexdigest()[:16])


def _source_files(folder: Path) -> list[Path]:
    """Python files below `folder` that are neither tests nor installed packages, in a fixed order."""
    return [file for file in _walk(folder, skipped=_NO_TEXT_FOLDERS) if file.suffix == ".py"]


def _text_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"there is no file or folder {path}", where="--data")
    return _walk(path, skipped=frozenset())


def _walk(folder: Path, *, skipped: frozenset[str]) -> list[Path]:
    """All files below a folder but hidden ones and those in skipped folders, sorted by relative path."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    # A link to nowhere cannot be read, and a pipe could be read for ever.
    found = [file for file in found if file.is_file()]
    return sorted(found, key=lambda file: file.relative_to(folder).parts)


def _contents(files: Iterable[Path]) -> Iterable[bytes]:
    """The bytes of every file that is text: binary files contain zero bytes, text does not."""
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read text: {error.strerror}: {file}", where="--data") from error
        if content and _FILE_END not in content:
            yield content + _FILE_END


@dataclass(frozen=True, kw_only=True)
class Batches:
    """A stream of global batches, of which every rank reads its own share.

    A batch is drawn from its key, so there is no state to save: a resumed run reads what an uninterrupted one would
    have read, and two ranks read together what one rank would read alone. `batch_size` is that of the global batch.
    """

    seed: int
    batch_size: int
    seq_len: int
    rank: int
    ranks: int

    def draw(self, blocks: Tensor, key: str | int) -> tuple[Tensor, Tensor]:
        """Draw this rank's share of one batch.

        Args:
            blocks: Text, uint8 (blocks, block bytes).
            key: Which batch: the step, or a name.

        Returns:
            Tokens and the tokens that follow them, int64 (batch_size / ranks, seq_len) each.
        """
        # Seeded with text, Python's generator hashes all of it, whereas torch's CPU generator
        # uses 32 bits of its seed only.
        dice = random.Random(f"{self.seed}/{key}")
        last_start = blocks.shape[1] - self.seq_len - 1
        windows = [(dice.randrange(len(blocks)), dice.randint(0, last_start)) for _ in range(self.batch_size)]
        share = self.batch_size // self.ranks
        mine = windows[self.rank * share : (self.rank + 1) * share]
        rows = torch.stack([blocks[block, start : start + self.seq_len + 1] for block, start in mine]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
