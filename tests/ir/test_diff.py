"""What a pass changed, node by node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fsdp_compile.ir.text.diff import GraphDiff, Moved, diff_graphs, format_diff

HEADER = "graph forward on cpu\n%x = input() : f32[2]\n"
BEFORE = (
    HEADER
    + """\
%a = aten.relu(%x) : f32[2]
%b = aten.neg(%a) : f32[2]
%c = aten.relu(%x) : f32[2]
%d = aten.mul.Tensor(%b, %c) : f32[2]
return (%d,)
"""
)
AFTER = (
    HEADER
    + """\
%c = aten.relu(%x) : f32[2]
%a = aten.relu(%x) : f32[2]
%e = aten.abs(%a) : f32[2]
%d = aten.mul.Tensor(%e, %c) : f32[2]
return (%d, %e)
"""
)


def test_says_what_was_added_removed_moved_and_changed() -> None:
    assert diff_graphs(BEFORE, AFTER) == GraphDiff(
        added=("e",),
        removed=("b",),
        moved=(Moved("c", after="x"),),
        changed=("d", "return"),
        operators=(("aten.abs", 1), ("aten.neg", -1)),
    )


def test_is_read_as_a_few_lines() -> None:
    assert format_diff(diff_graphs(BEFORE, AFTER)) == (
        "added 1: %e\nremoved 1: %b\nchanged 2: %d, return\nmoved %c after %x\naten.abs +1\naten.neg -1\n"
    )


def test_a_node_may_move_to_the_top() -> None:
    text = format_diff(diff_graphs("%a = f() : none\n%b = f() : none\n%c = f() : none\n",
                                   "%c = f() : none\n%a = f() : none\n%b = f() : none\n"))  # fmt: skip
    assert text == "moved %c to the top\n"


def test_equal_graphs_have_no_difference() -> None:
    assert diff_graphs(BEFORE, BEFORE).is_empty
    assert format_diff(diff_graphs(BEFORE, BEFORE)) == "nothing changed\n"


def test_a_changed_place_of_a_parameter_is_a_change_of_its_input() -> None:
    text = "%w = input(role=flat, unit=a) : f32[64]\n  .weight: offset=0\n"
    assert diff_graphs(text, text.replace("offset=0", "offset=32")).changed == ("w",)


@given(st.permutations(range(7)))
def test_the_moves_and_no_fewer_explain_the_new_order(order: list[int]) -> None:
    old = [f"%n{i} = f() : none" for i in range(7)]
    new = [old[i] for i in order]
    moved = [move.name for move in diff_graphs("\n".join(old), "\n".join(new)).moved]
    stayed = [i for i in order if f"n{i}" not in moved]
    assert stayed == sorted(stayed)
    assert len(stayed) == longest_rise(order)


def longest_rise(order: list[int]) -> int:
    """By trying every subset."""
    subsets = ([x for k, x in enumerate(order) if mask >> k & 1] for mask in range(1 << len(order)))
    return max(len(subset) for subset in subsets if subset == sorted(subset))
