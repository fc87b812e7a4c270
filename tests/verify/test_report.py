"""What a refused graph tells whoever has to find the bug."""

from __future__ import annotations

import pytest

from fsdp_compile.errors import InvariantError
from fsdp_compile.ir.graph import Phase, Role
from fsdp_compile.ir.source_line import source_line
from fsdp_compile.verify.check import check
from fsdp_compile.verify.facts import Limits
from fsdp_compile.verify.report import NEIGHBOURS, SHOWN, describe
from tests.verify import breaks, memory_breaks, record_breaks
from tests.verify.graphs import graph


def test_rule_node_pass_and_hint_are_named() -> None:
    step = graph(Phase.BACKWARD)
    named = breaks.gradient_reduced_twice(step)

    with pytest.raises(InvariantError) as caught:
        check(step, after="wrong-pass")

    error = caught.value
    assert "the backward graph is wrong after wrong-pass" in error.what
    assert f"reduced-once: %{named} reduces the gradient of blocks.0." in error.what
    assert error.instead is not None
    assert "reduced-once: sum the gradients of all reads first" in error.instead


def test_the_neighbourhood_shows_three_nodes_on_either_side_with_types() -> None:
    step = graph(Phase.FORWARD)
    use = breaks.unfinished_message_read(step)

    with pytest.raises(InvariantError) as caught:
        check(step)

    where = caught.value.where
    assert where is not None
    lines = where.splitlines()
    marked = lines.index(f"    > {describe(use)}")
    nodes = list(step.graph.nodes)
    place = nodes.index(use)
    assert lines[marked - NEIGHBOURS].endswith(describe(nodes[place - NEIGHBOURS]))
    assert lines[marked + NEIGHBOURS].endswith(describe(nodes[place + NEIGHBOURS]))
    assert ": float32[2, 8192]" in lines[marked]
    assert "{copy_out of blocks.2}" in lines[marked]


def test_the_users_own_line_is_shown() -> None:
    step = graph(Phase.FORWARD)
    use = breaks.unfinished_message_read(step)

    with pytest.raises(InvariantError) as caught:
        check(step)

    assert "tests/models/layers.py" in str(caught.value)
    assert "this.down(F.gelu(this.up(this.norm(x))))" in source_line(use)


def test_only_the_first_complaints_are_shown_and_the_rest_is_counted() -> None:
    step = graph(Phase.FORWARD)
    for node in list(step.nodes(Role.RESHARD)):
        step.graph.erase_node(node)
    memory_breaks.marker_left(step)
    record_breaks.record_forgotten(step)

    with pytest.raises(InvariantError) as caught:
        check(step)

    shown = [line for line in caught.value.what.splitlines()[1:] if not line.startswith("  and ")]
    assert len(shown) == SHOWN
    (rest,) = (line for line in caught.value.what.splitlines() if line.startswith("  and "))
    assert "more (" in rest
    assert "no-use-after-reshard" in rest


def test_a_budget_in_bytes_names_who_holds_how_much() -> None:
    step = graph(Phase.FORWARD)

    with pytest.raises(InvariantError, match=r"blocks\.0 [\d,]+, blocks\.1 [\d,]+") as caught:
        check(step, limits=Limits(unsharded_bytes=200_000))

    assert "the budget is 200,000 bytes" in str(caught.value)
