"""What counts as different, and by how much a run may differ."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fsdp_compile.parity.compare import Extent, Quantity, compare


def test_a_value_that_is_nan_on_one_side_alone_exceeds_every_bound() -> None:
    difference = compare(Quantity.LOSS, "loss", 0, torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]))
    assert (difference.absolute, difference.different) == (math.inf, 1)
    assert dataclasses.replace(difference, bound=1e9).exceeds


def test_nan_on_both_sides_is_no_difference() -> None:
    both = torch.tensor([math.nan, 1.0])
    assert compare(Quantity.LOSS, "loss", 0, both, both.clone()).different == 0


def test_tensors_of_different_dtypes_cannot_be_compared() -> None:
    difference = compare(Quantity.PARAMETER, "w", 0, torch.ones(2), torch.ones(2, dtype=torch.bfloat16))
    assert dataclasses.replace(difference, bound=1e9).exceeds


def test_the_parts_of_complex_numbers_are_compared_each() -> None:
    theirs = torch.tensor([1 + 2j, 3 - 4j, complex(math.nan, 1)])
    assert compare(Quantity.GRADIENT, "w", 0, theirs.conj(), theirs.conj().resolve_conj()).different == 0
    ours = theirs + torch.tensor([0, 0.5j, 0])
    difference = compare(Quantity.GRADIENT, "w", 0, ours, theirs)
    assert (difference.different, difference.numel, difference.absolute, difference.relative) == (1, 6, 0.5, 0.125)
    assert difference.ulps == 0.5 / (4 * torch.finfo(torch.float32).eps)
    half = compare(Quantity.GRADIENT, "w", 0, theirs + torch.tensor([0, 0, 1j]), theirs)
    assert half.absolute == 1  # beside a part that is NaN on both sides


def test_the_bound_of_a_path_grows_with_the_root_of_the_steps() -> None:
    extent = Extent(depth=10, length=64, elements=1000, dtype=torch.float32)
    assert extent.path(3) == pytest.approx(2 * extent.path(0))
    assert extent.path(1) > extent.path(0) > extent.sum() > 0


def test_narrow_results_may_differ_by_their_own_rounding() -> None:
    wide, narrow = (Extent(10, 64, 1000, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert narrow.sum() > 100 * wide.sum()
