"""`fsdp-compile opt`: runs passes on a graph that was written as text."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fsdp_compile.config.choices import DEFAULT_PASSES, STAGES, check_pass
from fsdp_compile.errors import ConfigError, InvariantError

if TYPE_CHECKING:
    from fsdp_compile.ir.graph import StepGraph
    from fsdp_compile.passes.base import GraphPass

NAME = "opt"
ABOUT = "Run passes on the text of a graph and print the graph that they make of it."

_NEVER: Final = "never"
_HARDWARE: Final = "hardware"
"""The option of passes that is a device and its link; `_EXAMPLE` is how it is written."""
_EXAMPLE: Final = "h100-sxm/50"
_ITEM: Final = re.compile(r"\s*([\w-]+)(?:\(([^()]*)\))?\s*(?:,|$)")


class Show(StrEnum):
    """What is printed."""

    GRAPH = "graph"
    PLANS = "plans"
    DIFFS = "diffs"


@dataclasses.dataclass(frozen=True)
class Applied:
    """What one pass did, as text: its plan, what it changed, and the graph after it."""

    name: str
    plan: str
    diff: str
    graph: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which graph, which passes, what is printed."""
    parser.add_argument("graph", metavar="GRAPH", help="file with the text of a graph; - for standard input")
    parser.add_argument(
        "--passes",
        metavar="A,B(OPTION=VALUE)",
        default=",".join(DEFAULT_PASSES),
        help="passes in the order in which they run; none for an empty one (default: %(default)s)",
    )
    parser.add_argument(
        "--verify",
        choices=[_NEVER, *STAGES],
        default=_NEVER,
        help="refuse a result that breaks a rule of this stage (default: %(default)s)",
    )
    parser.add_argument(
        "--show", type=Show, choices=list(Show), default=Show.GRAPH, help="what to print (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Runs the passes; returns 1 if the result breaks a rule.

    Raises:
        ConfigError: If the file, the graph or the passes cannot be read.
    """
    items = list(_items(arguments.passes))
    text = _read(arguments.graph)
    # Whatever is refused above is refused without importing torch.
    from fsdp_compile.ir.graph import Stage
    from fsdp_compile.ir.text.parser import parse_graph
    from fsdp_compile.verify.check import check

    pipeline = _make_all(items)
    step = parse_graph(text)
    try:
        applied = list(apply_passes(step, pipeline))
        print(_report(step, applied, arguments), end="")
        if arguments.verify != _NEVER:
            check(step, after=applied[-1].name if applied else "no pass", stage=Stage(arguments.verify))
    except InvariantError as error:
        print(f"fsdp-compile opt: {error}", file=sys.stderr)
        return 1
    return 0


def _report(step: StepGraph, applied: list[Applied], arguments: argparse.Namespace) -> str:
    from fsdp_compile.ir.text.printer import format_graph

    if arguments.json:
        passes_done = [dataclasses.asdict(one) for one in applied]
        return json.dumps({"passes": passes_done, "graph": format_graph(step)}, indent=2) + "\n"
    match arguments.show:
        case Show.PLANS:
            return "\n".join(f"# {one.name}\n{one.plan}" for one in applied)
        case Show.DIFFS:
            return "\n".join(f"# {one.name}\n{one.diff}" for one in applied)
    return format_graph(step)


def apply_passes(step: StepGraph, pipeline: list[GraphPass[Any]]) -> Iterator[Applied]:
    """Runs passes on a graph in place and says after each what it did.

    Raises:
        InvariantError: If a pass cannot take a graph, which breaks a rule, or leaves a node before one that it needs.
    """
    from fsdp_compile.ir.graph import Stage
    from fsdp_compile.ir.text.printer import format_diff, format_graph, format_plan
    from fsdp_compile.verify.check import RULES, check

    before, after_pass = format_graph(step), "the text was read"
    for graph_pass in pipeline:
        unchanged = step.copy()
        try:
            plan = graph_pass.plan(step)
            plan_text = format_plan(plan)
            graph_pass.apply(step, plan)
        except Exception:
            # A pass trusts what those before it leave. The verifier says what a graph by hand lacks, and in which line.
            rules = [rule for rule in RULES if rule.name != "markers-gone"]
            check(unchanged, after=after_pass, stage=Stage.INSERTED, rules=rules)
            raise
        after_pass = graph_pass.name
        try:
            step.graph.lint()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise InvariantError(f"{graph_pass.name} left an ill-formed graph: {reason}") from error
        after = format_graph(step)
        yield Applied(graph_pass.name, plan_text, format_diff(before, after), after)
        before = after


def known_passes() -> dict[str, GraphPass[Any]]:
    """Every pass by name, with the options of a fixed schedule where a planned one has others."""
    from fsdp_compile.options import FSDPOptions
    from fsdp_compile.pipeline import KINDS_OF_SCHEDULES, passes

    return {one.name: one for prefetch in KINDS_OF_SCHEDULES for one in passes(FSDPOptions(prefetch=prefetch))}


def default_passes() -> dict[str, GraphPass[Any]]:
    """The passes of a compile without options by name, in their order."""
    from fsdp_compile.options import FSDPOptions
    from fsdp_compile.pipeline import passes

    return {graph_pass.name: graph_pass for graph_pass in passes(FSDPOptions())}


def read_passes(text: str) -> list[GraphPass[Any]]:
    """Makes the passes of a list such as "insert-collectives,schedule-prefetch(distance=2)", or "none".

    Raises:
        ConfigError: For an unknown pass or option, or text that is no such list.
    """
    return _make_all(_items(text))


def _items(text: str) -> Iterator[tuple[str, str]]:
    """Name and options of each pass that a text lists."""
    position = 0
    while position < len(text) and text != "none":
        match = _ITEM.match(text, position)
        if match is None:
            raise ConfigError(
                f"{text!r} is not a list of passes", where="--passes", instead="bucket,schedule-prefetch(distance=2)"
            )
        check_pass(match[1])
        yield match[1], match[2] or ""
        position = match.end()


def _make_all(items: Iterable[tuple[str, str]]) -> list[GraphPass[Any]]:
    known = known_passes()
    return [_make(name, known[name], options) for name, options in items]


def _make(name: str, graph_pass: Any, options: str) -> GraphPass[Any]:
    fields = [field.name for field in dataclasses.fields(graph_pass)] if dataclasses.is_dataclass(graph_pass) else []
    values = {}
    for option in filter(None, (part.strip() for part in options.split(","))):
        key, _, value = option.partition("=")
        if key not in fields or not value:
            raise ConfigError(
                f"pass {name} has no option {option}",
                where="--passes",
                instead=" or ".join(f"{name}({field}={_example(graph_pass, field)})" for field in fields) or name,
            )
        where = f"{name}({option})"
        values[key] = _hardware(value, where) if key == _HARDWARE else _convert(value, getattr(graph_pass, key), where)
    return dataclasses.replace(graph_pass, **values) if values else graph_pass


def _example(graph_pass: Any, field: str) -> str:
    return _EXAMPLE if field == _HARDWARE else str(getattr(graph_pass, field))


def _hardware(text: str, where: str) -> Any:
    """The hardware of a device and the GB/s of its link."""
    from fsdp_compile.cost.hardware import hardware

    device, _, gb_per_s = text.partition("/")
    try:
        return hardware(device, float(gb_per_s))
    except ValueError:
        raise ConfigError(f"{text!r} is no device and GB/s", where=where, instead=f"{_HARDWARE}={_EXAMPLE}") from None


def _convert(text: str, default: Any, where: str) -> Any:
    try:
        return int(text) if default is None else type(default)(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a value like {default!r}", where=where) from None


def _read(path: str) -> str:
    if path == "-":
        return sys.stdin.read()
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", instead="a file that holds the text of a graph") from error
