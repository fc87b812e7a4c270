"""Chunks cover a tensor exactly once, or it is said why not."""

from __future__ import annotations

import itertools
import random

import pytest

from fsdp_compile.formats.coverage import Box, problem_with


def _box(*ranges: tuple[int, int]) -> Box:
    return Box(tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))


GOOD = {
    "whole": ((4, 3), [_box((0, 4), (0, 3))]),
    "rows": ((5, 2), [_box((0, 3), (0, 2)), _box((3, 5), (0, 2))]),
    "columns in rows": ((2, 4), [_box((0, 2), (0, 2)), _box((0, 1), (2, 4)), _box((1, 2), (2, 4))]),
    "a number": ((), [_box()]),
    "nothing": ((0, 4), []),
    "ranks without rows": ((1, 2), [_box((0, 1), (0, 2)), _box((1, 1), (0, 2)), _box((1, 1), (0, 2))]),
}
BAD = {
    "a row is missing": ((5, 2), [_box((0, 3), (0, 2)), _box((4, 5), (0, 2))], "have 8 elements of 10"),
    "nothing of it": ((5,), [], "have 0 elements of 5"),
    "a row twice": ((5, 2), [_box((0, 3), (0, 2)), _box((2, 5), (0, 2))], "[0:3, 0:2] and [2:5, 0:2] overlap"),
    "twice and not at all": ((4,), [_box((0, 2)), _box((1, 3))], "[0:2] and [1:3] overlap"),
    "outside": ((4,), [_box((0, 5))], "[0:5] is not inside of [4]"),
    "before": ((4,), [Box((-1,), (2,))], "is not inside of [4]"),
    "of fewer dimensions": ((4, 1), [_box((0, 4))], "is not inside of [4, 1]"),
    "a number twice": ((), [_box(), _box()], "overlap"),
    "no number": ((), [], "have 0 elements of 1"),
}


@pytest.mark.parametrize("name", GOOD)
def test_nothing_is_wrong(name: str) -> None:
    assert problem_with(*GOOD[name]) is None


@pytest.mark.parametrize("name", BAD)
def test_it_is_said_what_is_wrong(name: str) -> None:
    shape, boxes, said = BAD[name]
    problem = problem_with(shape, boxes)
    assert problem is not None
    assert said in problem


def test_drawn_boxes_are_judged_as_counting_does() -> None:
    draw = random.Random(0)
    shape = (3, 4)
    for _ in range(2000):
        boxes = []
        for _ in range(draw.randint(1, 4)):
            corners = [sorted((draw.randint(0, length), draw.randint(0, length))) for length in shape]
            boxes.append(_box(*((a, b) for a, b in corners)))
        counts = dict.fromkeys(itertools.product(*map(range, shape)), 0)
        for box in boxes:
            for place in itertools.product(*(range(s.start, s.stop) for s in box.index)):
                counts[place] += 1
        assert (problem_with(shape, boxes) is None) == (set(counts.values()) == {1}), boxes
