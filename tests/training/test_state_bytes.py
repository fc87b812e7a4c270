"""What a rank holds, by calculation and by looking."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_compile.training.loop import compare_bytes
from fsdp_compile.training.model import Llama, ModelShape
from fsdp_compile.training.state_bytes import StateBytes, expected, measured, storage_bytes

SHAPE = ModelShape(width=32, layers=2, heads=4, seq_len=16)
HIDDEN = 96  # 8/3 of 32 is 85.3; the next multiple of 32
# Embedding and head, then per layer four projections, three of the feed-forward, two norms, then the last norm.
NUMBERS = 2 * 256 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * HIDDEN + 2 * 32) + 32
PARAMETERS = 2 + 2 * 9 + 1


def test_an_unsharded_rank_holds_every_number_four_times_and_the_counters() -> None:
    assert expected(Llama(SHAPE), 1) == StateBytes(
        parameters=4 * NUMBERS, gradients=4 * NUMBERS, optimizer=8 * NUMBERS + 4 * PARAMETERS
    )


def test_four_ranks_hold_a_quarter_where_rows_divide() -> None:
    held = expected(Llama(SHAPE), 4)
    assert held.parameters == held.gradients == NUMBERS
    assert held.total == 4 * NUMBERS + 4 * PARAMETERS


def test_the_fullest_rank_counts_where_rows_do_not_divide() -> None:
    assert expected(nn.Linear(10, 7), 3).parameters == 4 * (3 * 10 + 3)  # 7 rows over 3 ranks: 3, 3, 1
    assert expected(nn.Linear(10, 2, bias=False), 4).parameters == 4 * 10


def test_looking_finds_what_was_calculated() -> None:
    model = Llama(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 16, dtype=torch.int64)).sum().backward()
    optimizer.step()
    assert measured(optimizer) == expected(model, 1)


def test_memory_that_tensors_share_counts_once() -> None:
    whole = torch.zeros(100)
    assert storage_bytes([whole[:50], whole[50:], torch.zeros(3)]) == 412


def test_the_line_says_every_part_in_megabytes() -> None:
    mine = StateBytes(parameters=500_000, gradients=500_000, optimizer=1_000_000)
    whole = StateBytes(parameters=1_000_000, gradients=1_000_000, optimizer=2_000_000)
    assert compare_bytes(mine, whole) == (
        "parameters 0.50 of 1.00 MB, gradients 0.50 of 1.00 MB, AdamW state 1.00 of 2.00 MB, together 2.00 of 4.00 MB"
    )
