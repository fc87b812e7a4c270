"""The user's line is found in the stack that Dynamo writes on a node."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fsdp_compile.ir import source_line as module
from fsdp_compile.ir.source_line import Frame, frames_of, source_frame, source_line

_TORCHS = f"{torch.__path__[0]}/nn/functional.py"
_OURS = module.__file__
_STACK = f"""
  File "/home/me/model.py", line 7, in forward
    return self.act(x)
           ^^^^^^^^^^^
  File "{_TORCHS}", line 9, in relu
    return torch.relu(input)
  File "/home/me/act.py", line 3, in <lambda>
  File "{_OURS}", line 11, in read
    return gather(module)
"""


def _node(stack: str | None) -> fx.Node:
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = stack
    return node


def test_frames_are_read_with_their_code_if_there_is_any() -> None:
    assert frames_of(_node(_STACK)) == [
        Frame("/home/me/model.py", 7, "forward", "return self.act(x)"),
        Frame(_TORCHS, 9, "relu", "return torch.relu(input)"),
        Frame("/home/me/act.py", 3, "<lambda>", ""),
        Frame(_OURS, 11, "read", "return gather(module)"),
    ]


@pytest.mark.parametrize(
    ("that_calls", "line"),
    [
        (None, 'File "/home/me/act.py", line 3, in <lambda>: '),
        (_TORCHS, 'File "/home/me/model.py", line 7, in forward: return self.act(x)'),
    ],
)
def test_the_innermost_line_of_the_user_counts(that_calls: str | None, line: str) -> None:
    assert source_line(_node(_STACK), that_calls=that_calls) == line


def test_torchs_line_is_better_than_none() -> None:
    frame = source_frame(_node(f'File "{_TORCHS}", line 9, in relu\n    return torch.relu(input)'))
    assert frame is not None
    assert not frame.is_users


@pytest.mark.parametrize("stack", [None, ""])
def test_a_node_that_serves_no_line_says_so(stack: str | None) -> None:
    assert source_line(_node(stack)) == "no line of the user's program"
