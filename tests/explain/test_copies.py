"""What is copied on the way into collectives and out of them, against the sizes of the parameters."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile.cost.copies import Way
from fsdp_compile.explain.api import explain
from fsdp_compile.explain.plan import Plan
from fsdp_compile.training.model import Llama, ModelShape
from tests.models.round_sizes import WIDTH, explained

RANKS, DEPTH = 4, 2
MATRIX, VECTOR = WIDTH * WIDTH, WIDTH


def _llama(**options: Any) -> Plan:
    """Units of this size would share collectives, which takes a copy of small parameters; larger ones do not."""
    torch.compiler.reset()
    with torch.device("meta"):
        model = Llama(ModelShape(width=WIDTH, layers=DEPTH, heads=4, seq_len=64))
        tokens = torch.zeros(2, 64, dtype=torch.long)
    return explain(model, tokens, world_size=RANKS, options={"bucket_mb": 0, **options})


def _copied(plan: Plan, *ways: Way) -> int:
    return sum(graph.copied_bytes[way] for graph in plan.graphs for way in ways)


def _is_norm(name: str) -> bool:
    return "norm" in name


@pytest.mark.long
@pytest.mark.core
def test_nothing_is_copied_around_gathers_and_no_matmul_weight_into_a_reduction() -> None:
    plan = _llama()
    assert _copied(plan, Way.INTO_GATHERS, Way.OUT_OF_GATHERS) == 0  # neither matmul weights nor the norms' scales
    into = [copy for graph in plan.graphs for copy in graph.copies if copy.way is Way.INTO_REDUCTIONS]
    assert all(_is_norm(name) for copy in into for name in copy.parameters)
    # Per block, the gradient of one of two scales is there before the kernel runs that writes their message.
    assert sum(copy.size_bytes for copy in into) <= DEPTH * 4 * VECTOR


@pytest.mark.long
def test_a_share_of_the_gradients_is_put_together_unless_a_cast_does_it() -> None:
    plan = _llama()
    blocks = sum(unit.shard_bytes for unit in plan.units if unit.parameters > 1)
    assert _copied(plan, Way.OUT_OF_REDUCTIONS) == blocks
    cast = _llama(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert _copied(cast, Way.OUT_OF_REDUCTIONS) == 0  # what casts gradients to float32 writes them where they belong
    assert _copied(cast, Way.INTO_GATHERS, Way.OUT_OF_GATHERS) == 0


def test_the_packed_layout_copies_every_gradient_of_a_unit() -> None:
    plan = _llama(reduce_layout="fsdp2")
    several = [unit for unit in plan.units if unit.parameters > 1]
    packed = _copied(plan, Way.INTO_REDUCTIONS)
    assert packed >= sum(unit.full_bytes for unit in several) - DEPTH * 2 * 4 * VECTOR
    assert _copied(plan, Way.INTO_GATHERS, Way.OUT_OF_GATHERS) == 0


def _out_of_gathers(**options: Any) -> list[tuple[tuple[str, ...], int]]:
    plan = explained(lower="inductor", **options)
    copies = [copy for graph in plan.graphs for copy in graph.copies if copy.way is Way.OUT_OF_GATHERS]
    return [(copy.parameters, copy.size_bytes) for copy in copies]


def test_a_bias_that_a_matmul_reads_is_copied_out_of_its_message() -> None:
    assert _out_of_gathers(bucket_mb=0) == [((f"blocks.{i}.linear.bias",), 4 * VECTOR) for i in range(3)]


def test_units_that_share_a_message_have_small_parameters_copied_out_at_once() -> None:
    of_each = ("norm.weight", "linear.bias")
    together = [tuple(f"blocks.{i}.{name}" for i in range(3)) for name in of_each]
    copies = _out_of_gathers()  # those of forward first
    assert copies[:2] == [(names, 3 * 4 * VECTOR) for names in together]


def test_without_a_compiler_small_parameters_are_copied_and_matmul_weights_are_not() -> None:
    plan = explained(bucket_mb=0)
    assert _copied(plan, Way.INTO_GATHERS) == 0
    assert _copied(plan, Way.OUT_OF_GATHERS) == 3 * 2 * 4 * VECTOR
    assert _copied(plan, Way.INTO_REDUCTIONS) == 3 * 2 * 4 * VECTOR
    assert _copied(plan, Way.OUT_OF_REDUCTIONS) == 3 * (MATRIX + 2 * VECTOR) * 4 // 4
    assert re.search(r"forward +out of gathers +6\.14 kB +6\n", str(plan))
    (_, backward) = plan.to_dict()["graphs"]
    assert backward["copied_bytes"]["into reductions"] == 3 * 2 * 4 * VECTOR
