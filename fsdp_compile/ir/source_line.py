"""The line of the user's program that a node of a graph computes or serves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import fx

_LIBRARIES = (Path(__file__).parents[1], Path(torch.__file__).parent)
"""Folders whose functions are torch's or this package's."""
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)')


class Frame(NamedTuple):
    """One function call on the way to a node."""

    file: str  # of the function
    line: int  # in the file
    function: str  # its name
    code: str  # the text of the line

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.function}: {self.code}'


def frames_of(node: fx.Node) -> list[Frame]:
    """The calls in which Dynamo recorded a node, outermost first."""
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    frames = []
    for line, code in zip(trace, [*trace[1:], ""], strict=False):
        if found := _FRAME.fullmatch(line):
            is_known = not code.startswith('File "')  # else the program was made of a string
            frames.append(Frame(found["file"], int(found["line"]), found["function"], code if is_known else ""))
    return frames


def source_line(node: fx.Node, *, that_calls: str | None = None) -> str:
    """The innermost call of a function of the user's in which a node was recorded, or of any if none is, for errors.

    With `that_calls`, a file, only calls before the first one of a function in it count.
    """
    frames = frames_of(node)
    if that_calls is not None:
        frames = frames[: [frame.file for frame in frames].index(that_calls)]
    users = [frame for frame in frames if not any(frame.file.startswith(f"{library}/") for library in _LIBRARIES)]
    return str((users or frames)[-1]) if frames else "no line of the user's program"
