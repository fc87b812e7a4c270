"""Where parameters lie in a flat parameter: aligned, disjoint, alike on every rank, and with little padding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compile.layout.flat_layout import (
    ALIGNMENT_BYTES,
    LARGE_BYTES,
    FlatLayout,
    ParameterShape,
    plan_layout,
    shard_numel,
)

SIZES = st.integers(1, 16)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
SHAPES = st.lists(st.integers(0, 300), max_size=3).map(tuple)


@st.composite
def parameters(draw: st.DrawFn) -> list[ParameterShape]:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=8))
    dims = [draw(st.integers(0, len(shape) - 1)) if shape else None for shape in shapes]
    return [ParameterShape(f"p{i}", shape, dim) for i, (shape, dim) in enumerate(zip(shapes, dims, strict=True))]


def torch_shard_numel(parameter: ParameterShape, size: int) -> int:
    """The largest chunk that torch hands out, which is the first one."""
    if parameter.dim is None:
        return 1
    return torch.empty(parameter.shape, device="meta").chunk(size, parameter.dim)[0].numel()


@given(parameters(), SIZES, DTYPES, DTYPES)
def test_slots_are_disjoint_aligned_and_large_enough(
    shapes: list[ParameterShape], size: int, stored: torch.dtype, sent: torch.dtype
) -> None:
    layout = plan_layout(shapes, size=size, stored=stored, sent=sent)
    assert sorted(slot.index for slot in layout.slots) == list(range(len(shapes)))
    end = 0
    for slot in layout.slots:
        assert slot.offset == end
        assert slot.extent >= max(1, torch_shard_numel(shapes[slot.index], size))
        for dtype in (stored, sent):
            assert slot.offset * dtype.itemsize % ALIGNMENT_BYTES == 0
            assert slot.extent * dtype.itemsize % ALIGNMENT_BYTES == 0
        end += slot.extent
    assert layout.numel == end > 0


@given(parameters(), SIZES, DTYPES)
def test_small_slots_come_first_and_registration_order_is_kept(
    shapes: list[ParameterShape], size: int, stored: torch.dtype
) -> None:
    layout = plan_layout(shapes, size=size, stored=stored, sent=stored)
    large = [torch_shard_numel(shapes[s.index], size) * stored.itemsize >= LARGE_BYTES for s in layout.slots]
    assert large == sorted(large)
    for group in (True, False):
        indices = [s.index for s, is_large in zip(layout.slots, large, strict=True) if is_large is group]
        assert indices == sorted(indices)


def test_nothing_to_lay_out_still_has_an_address() -> None:
    assert plan_layout([], size=4, stored=torch.float32, sent=torch.float32) == FlatLayout((), 64)


@given(
    width=st.sampled_from([512, 640, 768, 1000, 1024]),
    layers=st.integers(4, 12),
    size=SIZES,
    sent=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_padding_stays_below_one_percent_in_large_models(width: int, layers: int, size: int, sent: torch.dtype) -> None:
    """A transformer of more than 10 M parameters, unit by unit, with a vocabulary that nothing divides."""
    block: list[tuple[int, ...]] = [
        (3 * width, width),
        (3 * width,),
        (width, width),
        (width,),
        (4 * width, width),
        (width, 4 * width),
    ]
    units: list[list[tuple[int, ...]]]
    units = [[(32003, width)], *[[*block, (width,), (width,)]] * layers, [(width,), ()]]
    held = needed = 0
    for unit in units:
        shapes = [ParameterShape("p", shape, 0 if shape else None) for shape in unit]
        held += size * plan_layout(shapes, size=size, stored=torch.float32, sent=sent).numel
        needed += sum(math.prod(shape) for shape in unit)
    assert needed > 10e6
    assert held < 1.01 * needed


@given(SHAPES.filter(bool), SIZES, st.data())
def test_rows_are_those_of_torch_chunk(shape: tuple[int, ...], size: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    first, *_ = torch.empty(shape, device="meta").chunk(size, dim)
    assert shard_numel(shape, dim, size) == first.numel()


@pytest.mark.parametrize("size", [1, 3])
def test_a_number_is_held_by_every_rank(size: int) -> None:
    assert shard_numel((), None, size) == 1
