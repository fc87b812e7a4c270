"""The code of a graph that CUDA graphs are recorded of: Inductor cuts it into functions, and records each by itself.

    def partition_0(args): ...          recorded once, repeated at each step
    class Runner:
        def call(self, args):
            ... = self.partitions[0](...)
            torch.ops.fsdp_compile.update.default(...)      what the host takes part in runs each time

To record few functions, Inductor moves what it can to one side of such an operator. An update in backward is moved
behind the whole backward; and where an operator cannot be moved, the function ends there, also if a collective is under
way, which CUDA refuses to record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_CALLED = re.compile(r"self\.partitions\[(\d+)\]\(")
_HOST = re.compile(r"torch\.ops\.(\w+\.\w+)\.\w+\(")


def is_cut(code: str) -> bool:
    """Whether code is cut into functions for CUDA graphs."""
    return "def partition_0(" in code


def in_one_function(code: str) -> str:
    """Code that is cut, with its functions where they are called."""
    return "\n".join(text for _, text in _pieces(code))


def pieces(code: str) -> list[str]:
    """What is recorded by itself, or runs by itself, in its order."""
    return [text for _, text in _pieces(code)]


def not_recorded(code: str) -> list[str]:
    """Names of the operators that run outside of CUDA graphs, each once."""
    outside = (name for is_recorded, text in _pieces(code) if not is_recorded for name in _HOST.findall(text))
    return list(dict.fromkeys(outside))


def _pieces(code: str) -> Iterator[tuple[bool, str]]:
    """Whether each piece is recorded, and its text, which begins with the name of the function that is called."""
    between: list[str] = []
    for line in code[code.index("def call(") :].splitlines():
        called = _CALLED.search(line)
        if called is None:
            between.append(line)
            continue
        yield False, "\n".join(between)
        between = []
        yield True, _body(code, called[1])
    yield False, "\n".join(between)


def _body(code: str, number: str) -> str:
    after = code.partition(f"def partition_{number}(")[2]
    return re.split(r"\n(?=\S)", after, maxsplit=1)[0]
