"""The text of a read: what is written is read back, and nothing else is read."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_compile.layout.spec import Reshard, UnshardSpec, parse

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64)
TEXT = "offset=64 extent=32 shape=5x7 dim=0 over=fsdp.shard.0/4 param=bfloat16 reduce=float32 reshard=after_forward"
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
        param_dtype=draw(st.sampled_from(DTYPES)),
        reduce_dtype=draw(st.sampled_from(DTYPES)),
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
