"""Compares the order of communication in Inductor's code with the order in the planned graph.

    plan    %g = all_gather_coalesced([...])   %m = mm(...)   wait(%g 0)   %n = mm(...)
    code    buf3 = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default([...])
            torch.ops._c10d_functional.wait_tensor.default(buf4)            <- here the mm should be
            extern_kernels.mm(...)

Both are read as a list of calls: starts and waits of collectives, the package's own operators, and every operator that
the code calls as often as the graph has it (matmuls and attention, as a rule). What Inductor writes a kernel for has no
place of its own in the code, so it is not compared.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import getitem

from torch import fx

from fsdp_compile._torch.tensors import OpOverload
from fsdp_compile.errors import InvariantError
from fsdp_compile.verify.report import describe

_WAIT = "wait_tensor"
_OURS = ("_c10d_functional", "fsdp")
_CALL = re.compile(
    r"^ +(?:(?P<made>\w+) = )?"
    r"(?:(?:torch\.ops\.(?P<space>\w+)\.(?P<op>\w+)\.\w+|extern_kernels\.(?P<extern>\w+))\((?P<args>.*)"
    r"|(?P<of>\w+)\[(?P<item>\d+)\]$)",
    re.M,
)
_NAME = re.compile(r"\w+")
_NEAR = 3
"""Calls that an error shows before and after the first one that is out of place."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        operator: Its name.
        waits_for: Of a wait, the number of the collective among all, and of the message in it.
        is_ours: Whether it communicates, or is one of the package's operators.
        text: What an error shows.
    """

    operator: str
    waits_for: tuple[int, int] | None
    is_ours: bool
    text: str = dataclasses.field(compare=False)


def planned_calls(graph: fx.Graph) -> list[Call]:
    """The calls that a graph plans, in its order."""
    calls: list[Call] = []
    starts: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        space, _, operator = node.target._schema.name.partition("::")
        waited = _message(node.args[0], starts) if operator == _WAIT else None
        if space == _OURS[0] and operator != _WAIT:
            starts[node] = len(starts)
        calls.append(Call(operator, waited, space in _OURS, describe(node)))
    return calls


def _message(waited: object, starts: dict[fx.Node, int]) -> tuple[int, int] | None:
    """Which collective a wait is for, and which of its messages; `None` if it is for an input."""
    assert isinstance(waited, fx.Node)
    if waited.target is getitem:
        start, item = waited.args
        return (starts[start], item) if start in starts else None  # type: ignore[index, return-value]
    return (starts[waited], 0) if waited in starts else None


def written_calls(code: str) -> list[Call]:
    """The calls in the function that Inductor wrote, in their order."""
    calls: list[Call] = []
    numbers = 0
    messages: dict[str, tuple[int, int]] = {}
    for found in _CALL.finditer(code, max(code.find("def call("), 0)):
        if found["of"]:
            if found["of"] in messages:
                messages[found["made"]] = messages[found["of"]][0], int(found["item"])
            continue
        operator = found["extern"] or found["op"]
        waited = None
        if operator == _WAIT:
            waited = messages.get(_NAME.match(found["args"])[0])  # type: ignore[index]
        elif found["space"] == _OURS[0]:
            messages |= {name: (numbers, i) for i, name in enumerate(_results(operator, found))}
            operator = operator.removesuffix("_")
            numbers += 1
        calls.append(Call(operator, waited, found["space"] in _OURS, found[0].strip()))
    return calls


def _results(operator: str, found: re.Match[str]) -> Iterator[str]:
    """The names of a collective's messages as they arrive; one that works in place gives back what it took."""
    if found["made"]:
        yield found["made"]
    if operator.endswith("_"):
        listed = found["args"].startswith("[")
        yield from _NAME.findall(found["args"].partition("]" if listed else ",")[0])


def compare(planned: Sequence[Call], code: str, phase: str) -> list[str]:
    """Refuses code whose calls are in another order than planned.

    Args:
        planned: From `planned_calls`, before Inductor changed the graph.
        code: What Inductor wrote, in Python. Code for CUDA graphs is cut into functions, and not compared.
        phase: Of the graph, for the error.

    Returns:
        The operators that were compared.

    Raises:
        InvariantError: With the calls around the first one that is out of place.
    """
    written = written_calls(code)
    if "def partition_0(" in code or not written:
        return []
    in_plan, in_code = (Counter(call.operator for call in calls) for calls in (planned, written))
    compared = [op for op in in_plan if in_plan[op] == in_code[op]]
    ours = {call.operator for call in planned if call.is_ours}
    left, right = ([c for c in calls if c.operator in {*compared, *ours}] for calls in (planned, written))
    place = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    if place < max(len(left), len(right)):
        raise InvariantError(
            f"Inductor's code for the {phase} graph communicates in another order than planned",
            where="\n".join(["planned:", *_near(left, place), "written:", *_near(right, place)]),
            instead="options={'lower': 'eager'} until this is mended; of options={'inductor': ...}, leave out settings "
            "that reorder",
        )
    return compared


def _near(calls: Sequence[Call], place: int) -> list[str]:
    first = max(place - _NEAR, 0)
    return [f"  {'>' if i == place else ' '} {calls[i].text}" for i in range(first, min(place + _NEAR, len(calls)))]
