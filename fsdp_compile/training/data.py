"""Text as bytes: which parts are held out, and which windows of it each step reads."""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fsdp_compile.errors import ConfigError
from fsdp_compile.training.config import TrainConfig

USUAL_BLOCK_BYTES = 16384
HELD_OUT_EVERY = 20
"""One block in so many is held out, so held-out text comes from every part of the corpus."""
_FILE_END = b"\0"
_NO_TEXT_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class Corpus:
    """Text cut into blocks of one length: uint8 (blocks, block bytes), some for training and some never trained on.

    `source` tells people where it came from; `fingerprint` is a hash of the text, to notice that it changed.
    """

    train: Tensor
    held_out: Tensor
    source: str
    fingerprint: str


def read_corpus(data: str | None, seq_len: int) -> Corpus:
    """Read a file, a folder, or, for None, the source text of Python's standard library.

    The text is the same for the same files, whatever order the file system lists them in.

    Raises:
        ConfigError: The path does not exist or cannot be read, or has too little text for sequences of `seq_len` bytes.
    """
    if data is None:
        path = Path(sysconfig.get_path("stdlib"))
        text = _read(path, ending=".py", skipped=_NO_TEXT_FOLDERS)
        return cut(text, seq_len, f"source of Python's standard library in {path}")
    return cut(_read(Path(data)), seq_len, data)


def cut(text: bytes, seq_len: int, source: str) -> Corpus:
    """Cut text into blocks, each of one sequence and the byte after it at least; hold out every `HELD_OUT_EVERY`th.

    Raises:
        ConfigError: There are too few bytes for `HELD_OUT_EVERY` blocks.
    """
    block_bytes = min(max(USUAL_BLOCK_BYTES, seq_len + 1), len(text) // HELD_OUT_EVERY)
    if block_bytes < seq_len + 1:
        what = f"the text has {len(text)} bytes; sequences of {seq_len} need {HELD_OUT_EVERY * (seq_len + 1)}"
        raise ConfigError(what, where=f"--data ({source}), --seq-len", instead="a longer text or shorter sequences")
    usable = len(text) // block_bytes * block_bytes
    blocks = torch.frombuffer(bytearray(text[:usable]), dtype=torch.uint8).view(-1, block_bytes)
    held = torch.arange(len(blocks)) % HELD_OUT_EVERY == HELD_OUT_EVERY // 2
    return Corpus(blocks[~held], blocks[held], source, hashlib.sha256(text).hexdigest()[:16])


def draw_batch(config: TrainConfig, blocks: Tensor, key: str | int, *, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Draw the share of a rank of one batch, which follows from `config.seed` and its key: the step, or a name.

    There is no state to save: a resumed run reads what an uninterrupted one would have read, and ranks read together
    what one rank would read in a single process. `blocks` are uint8 (blocks, block bytes).

    Returns:
        Tokens and the tokens that follow them, int64 (batch_size / ranks, seq_len) each.
    """
    # Seeded with text, Python's generator hashes all of it, whereas torch's CPU generator uses 32 bits of its seed.
    dice = random.Random(f"{config.seed}/{key}")
    last_start = blocks.shape[1] - config.seq_len - 1
    windows = [(dice.randrange(len(blocks)), dice.randint(0, last_start)) for _ in range(config.batch_size)]
    share = config.batch_size // ranks
    mine = windows[rank * share : (rank + 1) * share]
    rows = torch.stack([blocks[block, start : start + config.seq_len + 1] for block, start in mine]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _read(path: Path, *, ending: str = "", skipped: frozenset[str] = frozenset()) -> bytes:
    """A file, or all files below a folder but hidden and binary ones and those in skipped folders."""
    if not path.exists():
        raise ConfigError(f"there is no file or folder {path}", where="--data")
    found = [path]
    for parent, folders, files in os.walk(path):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        found += [Path(parent, name) for name in files if name.endswith(ending) and not name.startswith(".")]
    contents = []
    for file in sorted(found, key=lambda file: file.relative_to(path).parts):
        try:
            # A folder and a link to nowhere cannot be read, and a pipe could be read for ever.
            contents.append(file.read_bytes() if file.is_file() else b"")
        except OSError as error:
            raise ConfigError(f"cannot read text: {error.strerror}: {file}", where="--data") from error
    # Binary files contain zero bytes, text does not.
    return b"".join(content + _FILE_END for content in contents if content and _FILE_END not in content)
