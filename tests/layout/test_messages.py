"""From messages to parameters and back, against torch.chunk: every shape, every dimension, up to eight ranks."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compile.layout.messages import EagerBuilder, full_parameter, gradient_rows
from fsdp_compile.layout.spec import UnshardSpec

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
    spec = UnshardSpec(
        offset=0,
        extent=1,
        shape=shape,
        dim=dim,
        size=size,
        group="g",
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
    )
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
    spec = UnshardSpec(
        offset=0,
        extent=8,
        shape=(8, 4),
        dim=0,
        size=4,
        group="g",
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
    )
    message = torch.arange(32.0)
    assert full_parameter(EAGER, message, spec, start=0, span=8).data_ptr() == message.data_ptr()
