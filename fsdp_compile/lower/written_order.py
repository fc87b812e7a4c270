"""Compares the order of communication in Inductor's code with the order in the planned graph.

    plan    %g = all_gather_coalesced([...])   %m = mm(...)   wait(%g 0)   %n = mm(...)
    code    buf3 = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default([...])
            torch.ops._c10d_functional.wait_tensor.default(buf4)            <- here the mm should be
            extern_kernels.mm(...)

Both are read as a list of calls: starts and waits of collectives, and beside them the package's own operators, matmuls
and attention, each kind if the code calls it as often as the graph has it. What Inductor writes a kernel for has no
place of its own in the code, so it is not compared.

For CUDA graphs Inductor cuts its code into functions, and records each by itself; what the host takes part in runs
between them each time. To record few functions, Inductor moves what it can to one side of such an operator (an update
in backward behind the whole backward), and a function ends at one that cannot be moved, also if a collective is under
way, which CUDA refuses to record.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import getitem

from torch import fx

from fsdp_compile._torch.tensors import OpOverload
from fsdp_compile.errors import ConfigError, InvariantError
from fsdp_compile.verify.report import describe

_WAIT = "wait_tensor"
_COLLECTIVES = "_c10d_functional"
_ALIKE = {"addmm": "mm", "bias_addmm": "mm", "baddbmm": "bmm"}
"""Matmuls that Inductor turns into each other, with the bias added inside or outside."""
_MATMULS = ("mm", "bmm")
_CALL = re.compile(
    r"^ +(?:(?P<made>\w+) = )?"
    r"(?:(?:torch\.ops\.(?P<space>\w+)\.(?P<op>\w+)\.\w+|extern_kernels\.(?P<extern>\w+))\((?P<args>.*)"
    r"|(?P<of>\w+)\[(?P<item>\d+)\]$)",
    re.M,
)
_NAME = re.compile(r"\b(?!reinterpret_tensor\b)[a-zA-Z_]\w*")
_CALLED = re.compile(r"self\.partitions\[(\d+)\]\(")
_HOST = re.compile(r"torch\.ops\.(\w+\.\w+)\.\w+\(")
_NEAR = 3
"""Calls that an error shows before and after the first one that is out of place."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an operator that has its place.

    Attributes:
        operator: Its name; one for all kinds of a matmul.
        communicates: Whether it starts a collective, or waits for one.
        waits_for: Of a wait, the number of the collective among all, and of the message in it.
        text: What an error shows.
    """

    operator: str
    communicates: bool
    waits_for: tuple[int, int] | None
    text: str = dataclasses.field(compare=False)


def planned_calls(graph: fx.Graph) -> list[Call]:
    """The calls that a graph plans, in its order."""
    calls: list[Call] = []
    starts: dict[fx.Node, int] = {}
    for node in filter(has_a_place, graph.nodes):
        space, operator = _name_of(node)
        waited = None
        if operator == _WAIT:
            start, item = node.all_input_nodes[0], 0
            if start.target is getitem:
                start, item = start.args
            waited = (starts[start], item) if start in starts else None  # else it is for an input
        elif space == _COLLECTIVES:
            starts[node] = len(starts)
        calls.append(Call(_ALIKE.get(operator, operator), space == _COLLECTIVES, waited, describe(node)))
    return calls


def has_a_place(node: fx.Node) -> bool:
    """Whether a node calls an operator that the code of a graph calls in the graph's order."""
    return isinstance(node.target, OpOverload) and _has_a_place(*_name_of(node))


def _name_of(node: fx.Node) -> tuple[str, str]:
    """The namespace of a node's operator, and its name there."""
    space, _, operator = node.target._schema.name.partition("::")  # type: ignore[union-attr]
    return space, operator


def _has_a_place(space: str, operator: str) -> bool:
    return (
        space in (_COLLECTIVES, "fsdp_compile") or _ALIKE.get(operator, operator) in _MATMULS or "attention" in operator
    )


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
        space, operator = found["space"] or "", found["extern"] or found["op"]
        if not _has_a_place(space, operator):
            continue
        waited = None
        communicates = space == _COLLECTIVES
        if operator == _WAIT:
            waited = next((messages.get(name) for name in _NAME.findall(found["args"])), None)
        elif communicates:
            messages |= {name: (numbers, i) for i, name in enumerate(_results(operator, found))}
            operator = operator.removesuffix("_")
            numbers += 1
        calls.append(Call(_ALIKE.get(operator, operator), communicates, waited, found[0].strip()))
    return calls


def _results(operator: str, found: re.Match[str]) -> Iterator[str]:
    """The names of a collective's messages as they arrive; one that works in place gives back what it took."""
    if operator.endswith("_"):
        end = "]" if found["args"].startswith("[") else "'"  # a list of messages, or one and then a text
        yield from _NAME.findall(found["args"].partition(end)[0])
    elif found["made"]:
        yield found["made"]


def compare(planned: Sequence[Call], code: str, phase: str) -> list[str]:
    """Refuses code of a `phase` whose calls are in another order than planned; returns the operators that it compared.

    Raises:
        InvariantError: With the calls around the first one that is out of place.
        ConfigError: If CUDA graphs are the reason, or cannot be recorded of this code.
    """
    is_cut = "def partition_0(" in code
    written = written_calls("\n".join(text for _, text in _pieces(code)) if is_cut else code)
    if not written:
        return []
    in_plan, in_code = (Counter(call.operator for call in calls) for calls in (planned, written))
    compared = [operator for operator in in_plan if in_plan[operator] == in_code[operator]]
    left, right = ([c for c in calls if c.communicates or c.operator in compared] for calls in (planned, written))
    place = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    is_other = place < max(len(left), len(right))
    around = "\n".join(["planned:", *_near(left, place), "written:", *_near(right, place)])
    # Whether a collective is started in one CUDA graph, or outside of them, and waited for in another.
    calls = (call for _, piece in (_pieces(code) if is_cut else ()) for call in written_calls(piece))
    waits_elsewhere = any(call.operator == _WAIT and call.waits_for is None for call in calls)
    if is_cut and (is_other or waits_elsewhere):
        raise ConfigError(
            f"the {phase} graph calls {', '.join(not_recorded(code))}, which no CUDA graph can record: "
            "Inductor has moved it away from its place, or divided the graph there while a collective is under way",
            where=f"CUDA graphs, by options={{'inductor': ...}} or mode=...\n{around if is_other else ''}".strip(),
            instead="leave out CUDA graphs, or the feature that needs the operator: step_in_backward(), "
            "'embedding': 'sharded', register_comm_hook(), offload_policy, 'poison', or an operator of the model's own",
        )
    if is_other:
        raise InvariantError(
            f"Inductor's code for the {phase} graph communicates in another order than planned",
            where=around,
            instead="options={'lower': 'eager'} until this is mended; of options={'inductor': ...}, leave out settings "
            "that reorder or join collectives",
        )
    return compared


def _near(calls: Sequence[Call], place: int) -> list[str]:
    first = max(place - _NEAR, 0)
    return [f"  {'>' if i == place else ' '} {calls[i].text}" for i in range(first, min(place + _NEAR, len(calls)))]


def not_recorded(code: str) -> list[str]:
    """Names of the operators that run outside of CUDA graphs, each once."""
    outside = (name for is_recorded, text in _pieces(code) if not is_recorded for name in _HOST.findall(text))
    return list(dict.fromkeys(outside))


def _pieces(code: str) -> Iterator[tuple[bool, str]]:
    """What is recorded by itself, or runs by itself, in its order: whether it is recorded, and its text."""
    between: list[str] = []
    for line in code[code.index("def call(") :].splitlines():
        called = _CALLED.search(line)
        if called is None:
            between.append(line)
            continue
        yield False, "\n".join(between)
        between = []
        body = code.partition(f"def partition_{called[1]}(")[2]
        yield True, re.split(r"\n(?=\S)", body, maxsplit=1)[0]
    yield False, "\n".join(between)
