"""Whether the chunks of a tensor cover it exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins, and how long it is, in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """What `tensor[...]` takes."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True)) + "]"


def problem_with(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Why boxes do not cover a shape exactly once, None if they do; boxes without elements do not count."""
    for box in boxes:
        if not _is_inside(shape, box):
            return f"its part {box} is not inside of {list(shape)}"
    filled = [box for box in boxes if prod(box.sizes)]
    for first, second in _overlapping(shape, filled):
        return f"its parts {first} and {second} overlap"
    covered = sum(prod(box.sizes) for box in filled)
    # No overlap, nothing outside: as many elements as there are is each once.
    if covered != prod(shape):
        return f"its parts have {covered} elements of {prod(shape)}"
    return None


def _is_inside(shape: tuple[int, ...], box: Box) -> bool:
    if not len(shape) == len(box.offsets) == len(box.sizes):
        return False
    each = zip(shape, box.offsets, box.sizes, strict=True)
    return all(o >= 0 and s >= 0 and o + s <= length for length, o, s in each)


def _overlapping(shape: tuple[int, ...], boxes: list[Box]) -> list[tuple[Box, Box]]:
    """The first pair that overlaps, found along the longest dimension."""
    if not shape:
        return [(boxes[0], boxes[1])] if len(boxes) > 1 else []
    along = max(range(len(shape)), key=shape.__getitem__)
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[along]):
        start = box.offsets[along]
        open_boxes = [other for other in open_boxes if other.offsets[along] + other.sizes[along] > start]
        for other in open_boxes:
            if _meet(box, other):
                return [(other, box)]
        open_boxes.append(box)
    return []


def _meet(first: Box, second: Box) -> bool:
    corners = zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
    return all(a < b + q and b < a + p for a, p, b, q in corners)
