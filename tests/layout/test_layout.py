"""Where parameters lie: slots, messages, records and hosts."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compile.layout.flat_layout import (
    ALIGNMENT_BYTES,
    LARGE_BYTES,
    plan_layout,
    shard_numel,
)
from fsdp_compile.layout.hosts import GroupRanks, ranks_per_host
from fsdp_compile.layout.messages import EagerBuilder, full_parameter, gradient_rows
from fsdp_compile.layout.spec import Reshard, UnshardSpec, parse

SIZES = st.integers(1, 16)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
SHAPES = st.lists(st.integers(0, 300), max_size=3).map(tuple)


@st.composite
def shard_numels(draw: st.DrawFn) -> list[int]:
    shapes, size = draw(st.lists(SHAPES, min_size=1, max_size=8)), draw(SIZES)
    return [torch_shard_numel(shape, draw(st.integers(0, len(shape) - 1)) if shape else None, size) for shape in shapes]


def torch_shard_numel(shape: tuple[int, ...], dim: int | None, size: int) -> int:
    """The largest chunk that torch hands out, which is the first one."""
    return 1 if dim is None else torch.empty(shape, device="meta").chunk(size, dim)[0].numel()


@given(shard_numels(), DTYPES, DTYPES)
def test_slots_are_disjoint_aligned_and_large_enough(numels: list[int], stored: torch.dtype, sent: torch.dtype) -> None:
    places = plan_layout(numels, stored=stored, sent=sent)
    end = 0
    for (offset, extent), numel in sorted(zip(places, numels, strict=True)):
        assert offset == end
        assert extent >= max(1, numel)
        for dtype in (stored, sent):
            assert offset * dtype.itemsize % ALIGNMENT_BYTES == 0
            assert extent * dtype.itemsize % ALIGNMENT_BYTES == 0
        end += extent


@given(shard_numels(), DTYPES)
def test_small_slots_come_first_and_registration_order_is_kept(numels: list[int], stored: torch.dtype) -> None:
    places = plan_layout(numels, stored=stored, sent=stored)
    are_large = [numel * stored.itemsize >= LARGE_BYTES for numel in numels]
    assert [large for _, large in sorted(zip(places, are_large, strict=True))] == sorted(are_large)
    for group in (True, False):
        own = [place for place, large in zip(places, are_large, strict=True) if large is group]
        assert own == sorted(own)


@given(
    width=st.sampled_from([512, 640, 768, 1000, 1024]),
    layers=st.integers(4, 12),
    size=SIZES,
    sent=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_padding_stays_below_one_percent_in_large_models(width: int, layers: int, size: int, sent: torch.dtype) -> None:
    """A transformer of more than 10 M parameters, unit by unit, with a vocabulary that nothing divides."""
    attention: list[tuple[int, ...]] = [(3 * width, width), (3 * width,), (width, width), (width,)]
    block = [*attention, (4 * width, width), (width, 4 * width), (width,), (width,)]
    units: list[list[tuple[int, ...]]] = [[(32003, width)], *[block] * layers, [(width,), ()]]
    held = needed = 0
    for unit in units:
        numels = [shard_numel(shape, 0 if shape else None, size) for shape in unit]
        held += size * max(map(sum, plan_layout(numels, stored=torch.float32, sent=sent)))
        needed += sum(math.prod(shape) for shape in unit)
    assert needed > 10e6
    assert held < 1.01 * needed


@given(SHAPES.filter(bool), SIZES, st.data())
def test_rows_are_those_of_torch_chunk(shape: tuple[int, ...], size: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    assert shard_numel(shape, dim, size) == torch_shard_numel(shape, dim, size)


@pytest.mark.parametrize("size", [1, 3])
def test_a_number_is_held_by_every_rank(size: int) -> None:
    assert shard_numel((), None, size) == 1


SPEC = UnshardSpec(
    offset=64,
    extent=32,
    shape=(5, 7),
    dim=0,
    size=4,
    group="fsdp.shard.0",
    param_dtype=torch.bfloat16,
    reduce_dtype=torch.float32,
)
EAGER = EagerBuilder()
JUNK = -77.0
"""Stands wherever a message holds something else: other slots, alignment, rows of ranks that have fewer."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A parameter, its slot, and where the slot starts in each rank's part of a message of `span` elements."""

    full: torch.Tensor
    spec: UnshardSpec
    start: int
    span: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 8))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    dim = draw(st.integers(0, len(shape) - 1)) if shape else None
    if dim is not None and dim > 0:  # other dimensions than the first must divide
        shape = (*shape[:dim], shape[dim] * size, *shape[dim + 1 :])
    spec = dataclasses.replace(SPEC, offset=0, shape=shape, dim=dim, size=size, param_dtype=torch.float32)
    spec = dataclasses.replace(spec, extent=max(1, spec.shard_numel) + draw(st.integers(0, 5)))
    start = draw(st.integers(0, 4))
    full = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)
    return Case(full, spec, start, start + spec.extent + draw(st.integers(0, 4)))


def chunks_of(case: Case) -> list[torch.Tensor]:
    """What each rank holds, by torch's own rule; ranks beyond the last chunk hold nothing."""
    if case.spec.dim is None:
        return [case.full] * case.spec.size
    chunks = list(case.full.chunk(case.spec.size, case.spec.dim))
    return chunks + [case.full.new_empty(0)] * (case.spec.size - len(chunks))


@given(cases())
def test_the_full_parameter_out_of_a_gathered_message(case: Case) -> None:
    message = torch.full((case.spec.size, case.span), JUNK)
    for row, chunk in zip(message, chunks_of(case), strict=True):
        row[case.start : case.start + chunk.numel()] = chunk.reshape(-1)
    full = full_parameter(EAGER, message.reshape(-1), case.spec, start=case.start, span=case.span)
    assert full.shape == case.full.shape
    assert torch.equal(full, case.full)


@given(cases())
def test_gradient_rows_are_what_each_rank_holds_then_zeros(case: Case) -> None:
    rows = gradient_rows(EAGER, case.full, case.spec)
    assert rows.shape == (case.spec.size, case.spec.extent)
    for row, chunk in zip(rows, chunks_of(case), strict=True):
        assert torch.equal(row[: chunk.numel()], chunk.reshape(-1))
        assert not row[chunk.numel() :].any()


@given(cases())
def test_a_gradient_of_any_strides_gives_the_same_rows(case: Case) -> None:
    """Gradients of transposed reads arrive transposed, those of sums expanded."""
    transposed = case.full.mT.contiguous().mT if case.full.dim() >= 2 else case.full
    assert torch.equal(gradient_rows(EAGER, transposed, case.spec), gradient_rows(EAGER, case.full, case.spec))
    expanded = torch.ones(()).expand(case.full.shape)
    assert torch.equal(
        gradient_rows(EAGER, expanded, case.spec), gradient_rows(EAGER, torch.ones(case.full.shape), case.spec)
    )


def test_a_slot_alone_in_its_message_is_read_in_place() -> None:
    spec = dataclasses.replace(SPEC, offset=0, extent=8, shape=(8, 4), param_dtype=torch.float32)
    message = torch.arange(32.0)
    assert full_parameter(EAGER, message, spec, start=0, span=8).data_ptr() == message.data_ptr()


SPEC_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64)
TEXT = "offset=64 extent=32 shape=5x7 dim=0 over=fsdp.shard.0/4 param=bfloat16 reduce=float32 reshard=after_forward"


@st.composite
def specs(draw: st.DrawFn) -> UnshardSpec:
    shape = tuple(draw(st.lists(st.integers(0, 2**40), max_size=5)))
    replicas = draw(st.integers(1, 512))
    return UnshardSpec(
        offset=draw(st.integers(0, 2**50)),
        extent=draw(st.integers(1, 2**50)),
        shape=shape,
        dim=draw(st.integers(0, len(shape) - 1)) if shape else None,
        size=draw(st.integers(1, 4096)),
        group=f"fsdp.shard.{draw(st.integers(0, 20))}",
        replicas=replicas,
        replicate_group=f"fsdp.replicate.{draw(st.integers(0, 20))}" if replicas > 1 else "",
        stride=draw(st.integers(1, 8)),
        replicate_stride=draw(st.integers(1, 64)) if replicas > 1 else 1,
        param_dtype=draw(st.sampled_from(SPEC_DTYPES)),
        reduce_dtype=draw(st.sampled_from(SPEC_DTYPES)),
        reshard=draw(st.sampled_from(Reshard)),
    )


@given(specs())
def test_the_text_reads_back_as_the_same_spec(spec: UnshardSpec) -> None:
    assert parse(spec.text) == spec


@given(specs(), specs())
def test_two_specs_share_a_text_only_if_they_are_equal(a: UnshardSpec, b: UnshardSpec) -> None:
    assert (a.text == b.text) == (a == b)


def test_the_text_is_this() -> None:
    """Graph text and golden files contain it."""
    assert SPEC.text == TEXT
    replicated = dataclasses.replace(SPEC, shape=(), dim=None, replicas=2, replicate_group="fsdp.replicate.0")
    assert "shape=scalar dim=none over=fsdp.shard.0/4 replicas=fsdp.replicate.0/2 param=" in replicated.text
    # Strides of a mesh (replicate, shard) of neighbours are left out.
    assert "stride" not in dataclasses.replace(replicated, replicate_stride=4).text
    between = dataclasses.replace(replicated, stride=2, replicate_stride=16)
    assert between.text.endswith("reshard=after_forward stride=2 replicate_stride=16")


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("offset=64 ", ""),
        ("offset=64", "offset=x"),
        ("shape=5x7", "shape=5x"),
        ("dim=0", "dim=zero"),
        ("over=fsdp.shard.0/4", "over=fsdp.shard.0"),
        ("param=bfloat16", "param=bfloat17"),
        ("param=bfloat16", "param=nn"),
        ("reshard=after_forward", "reshard=never"),
        ("reshard=after_forward", "reshard=after_forward more"),
        ("reshard=after_forward", "reshard=after_forward unknown=1"),
        ("offset=64", "offset=-64"),
        ("dim=0", "dim=2"),
        (TEXT, ""),
    ],
)
def test_other_text_is_refused_and_quoted(good: str, bad: str) -> None:
    text = TEXT.replace(good, bad)
    with pytest.raises(ValueError, match="not the text of a read") as caught:
        parse(text)
    assert repr(text) in str(caught.value)


def test_shapes_of_an_uneven_parameter() -> None:
    assert SPEC.shard_shape == (2, 7)
    assert SPEC.shard_numel == 14
    assert SPEC.padded_shape == (8, 7)
    assert not SPEC.is_contiguous
    assert dataclasses.replace(SPEC, extent=14, shape=(8, 7)).is_contiguous


@pytest.mark.parametrize(
    ("group", "per_host", "together"),
    [
        (GroupRanks(64), 8, 8),
        (GroupRanks(8), 8, 8),
        (GroupRanks(4), 8, 4),
        (GroupRanks(8, stride=8), 8, 1),
        (GroupRanks(4, stride=4), 8, 2),
        (GroupRanks(4, stride=2), 8, 4),
        (GroupRanks(4, stride=16), 8, 1),
        (GroupRanks(6), 4, 2),  # four on one host, two on the other
        (GroupRanks(1), 8, 1),
    ],
)
def test_ranks_of_a_group_on_one_host(group: GroupRanks, per_host: int, together: int) -> None:
    assert group.on_one_host(per_host) == together


@pytest.mark.parametrize(
    ("ranks", "group"),
    [((0, 1, 2, 3), GroupRanks(4)), ((3, 11, 19), GroupRanks(3, 8)), ((5,), GroupRanks(1)), ((1, 0), GroupRanks(2))],
)
def test_the_stride_is_that_of_the_ranks(ranks: tuple[int, ...], group: GroupRanks) -> None:
    assert GroupRanks.of(ranks) == group


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": ""}, None),
        ({"LOCAL_WORLD_SIZE": "0"}, None),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}, 4),
        # Eight ranks on one host, four on the other: both say the same.
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "12", "GROUP_WORLD_SIZE": "2"}, 6),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "12", "GROUP_WORLD_SIZE": "2"}, 6),
    ],
)
def test_what_a_launcher_says(environment: dict[str, str], found: int | None) -> None:
    assert ranks_per_host(environment) == found
