"""What a pass changed, from the text of a graph before and after it."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import re
from collections.abc import Sequence
from typing import Final

_NODE: Final = re.compile(r"%(\w+) = ([\w.]+)\(")


@dataclasses.dataclass(frozen=True)
class Moved:
    """A node with another place among those that were there before; `after` is empty at the top of the graph."""

    name: str
    after: str


@dataclasses.dataclass(frozen=True)
class GraphDiff:
    """What changed, each in the order of the graph that it is in.

    Attributes:
        moved: The fewest nodes whose moves explain the new order.
        changed: Nodes whose arguments, record or type differ; "return" if the outputs do.
        operators: How many more (or fewer) calls of each operator there are, sorted by name, without zeros.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    moved: tuple[Moved, ...]
    changed: tuple[str, ...]
    operators: tuple[tuple[str, int], ...]

    @property
    def is_empty(self) -> bool:
        """Whether the graphs are the same."""
        return not (self.added or self.removed or self.moved or self.changed)


def diff_graphs(before: str, after: str) -> GraphDiff:
    """Compares two texts of `format_graph`."""
    old, new = _lines(before), _lines(after)
    moved = _moved([name for name in old if name in new], [name for name in new if name in old])
    names = list(new)
    predecessors = dict(zip(names, ["", *names], strict=False))
    old_calls, new_calls = _calls(before), _calls(after)
    return GraphDiff(
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        moved=tuple(Moved(name, predecessors[name]) for name in moved),
        changed=tuple(name for name in new if name in old and old[name] != new[name]),
        operators=tuple(
            (name, new_calls[name] - old_calls[name])
            for name in sorted(old_calls | new_calls)
            if new_calls[name] != old_calls[name]
        ),
    )


def format_diff(diff: GraphDiff) -> str:
    """A few lines that describe the changes, ending in a line feed."""
    if diff.is_empty:
        return "nothing changed\n"
    lines = [
        *_listed("added", diff.added),
        *_listed("removed", diff.removed),
        *_listed("changed", diff.changed),
        *(f"moved %{m.name} after %{m.after}" if m.after else f"moved %{m.name} to the top" for m in diff.moved),
        *(f"{name} {count:+d}" for name, count in diff.operators),
    ]
    return "\n".join(lines) + "\n"


def _listed(what: str, names: Sequence[str]) -> list[str]:
    shown = (name if name == "return" else f"%{name}" for name in names)
    return [f"{what} {len(names)}: {', '.join(shown)}"] if names else []


def _lines(text: str) -> dict[str, str]:
    """Each node's line by the node's name, with the indented lines below it."""
    found: dict[str, str] = {}
    name = None
    for line in text.splitlines():
        if match := _NODE.match(line):
            name = match[1]
            found[name] = line
        elif line.startswith("return "):
            found["return"] = line
        elif line.startswith(" ") and name is not None:
            found[name] += "\n" + line
    return found


def _calls(text: str) -> collections.Counter[str]:
    return collections.Counter(match[2] for line in text.splitlines() if (match := _NODE.match(line)))


def _moved(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """The nodes of `new` outside of its longest subsequence that is in the order of `old`."""
    place = {name: index for index, name in enumerate(old)}
    # Patience sorting: `tails[k]` is the smallest place at which an ordered part of k + 1 nodes can end.
    tails: list[int] = []
    lengths: list[int] = []
    for name in new:
        k = bisect.bisect_left(tails, place[name])
        tails[k : k + 1] = [place[name]]
        lengths.append(k)
    kept: set[str] = set()
    wanted, bound = len(tails) - 1, len(old)
    # Back from the end of the longest one: each node ends one of the next shorter length, at an earlier place.
    for name, length in zip(reversed(new), reversed(lengths), strict=True):
        if length == wanted and place[name] < bound:
            kept.add(name)
            wanted, bound = wanted - 1, place[name]
    return [name for name in new if name not in kept]
