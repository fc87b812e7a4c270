"""Which windows of text each step reads, as a function of seed, step and rank alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batches:
    """A stream of global batches, of which every rank reads its own share.

    A batch is drawn anew for every key, so there is no state to save: a resumed run reads what an
    uninterrupted one would have read, and two ranks read together what one rank would read alone.

    Attributes:
        seed: Decides all windows.
        batch_size: Sequences of the global batch; a multiple of `ranks`.
        seq_len: Tokens per sequence.
        rank: The rank whose share is drawn.
        ranks: Number of ranks.
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
