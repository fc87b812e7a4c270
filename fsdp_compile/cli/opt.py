"""`fsdp-compile opt`: runs passes on a graph that was written as text."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
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
        "--show",
        choices=["graph", "plans", "diffs"],
        default="graph",
        help="the last graph, or the plan or the changes of each pass (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the passes; returns 1 if the result breaks a rule.

    Raises:
        ConfigError: If the file, the graph or the passes cannot be read.
    """
    items = list(_items(arguments.passes))
    text = sys.stdin.read() if arguments.graph == "-" else _read(arguments.graph)
    # Whatever is refused above is refused without importing torch.
    from fsdp_compile.ir.graph import Stage
    from fsdp_compile.ir.text.parser import parse_graph
    from fsdp_compile.ir.text.printer import format_graph
    from fsdp_compile.verify.check import check

    pipeline = [make_pass(*item) for item in items]
    step = parse_graph(text)
    try:
        applied = list(apply_passes(step, pipeline))
        if arguments.show == "graph":
            print(format_graph(step), end="")
        else:
            shown = [(one.name, one.plan if arguments.show == "plans" else one.diff) for one in applied]
            print("\n".join(f"# {name}\n{said}" for name, said in shown), end="")
        if arguments.verify != _NEVER:
            check(step, after=applied[-1].name if applied else "no pass", stage=Stage(arguments.verify))
    except InvariantError as error:
        print(f"fsdp-compile opt: {error}", file=sys.stderr)
        return 1
    return 0


def apply_passes(step: StepGraph, pipeline: Sequence[GraphPass[Any]]) -> Iterator[Applied]:
    """Runs passes on a graph in place and says after each what it did.

    Raises:
        InvariantError: If a pass cannot take a graph, which breaks a rule, or leaves a node before one that it needs.
    """
    from fsdp_compile.ir.text.printer import format_diff, format_graph, format_plan
    from fsdp_compile.verify.check import check

    before, after_pass = format_graph(step), "the text was read"
    for graph_pass in pipeline:
        unchanged = step.copy()
        try:
            plan = graph_pass.plan(step)
            plan_text = format_plan(plan)
            graph_pass.apply(step, plan)
        except Exception:
            # A pass trusts what those before it leave. The verifier says what a graph by hand lacks, and in which line.
            check(unchanged, after=after_pass, stage=graph_pass.requires)
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


def make_pass(name: str, options: str) -> GraphPass[Any]:
    """A pass with options, such as "distance=2"."""
    made: Any = known_passes()[name]
    declared = dataclasses.fields(made) if dataclasses.is_dataclass(made) else ()
    fields = {field.name: getattr(made, field.name) for field in declared}
    examples = [f"{name}({field}={_EXAMPLE if field == _HARDWARE else default})" for field, default in fields.items()]
    for option in filter(None, (part.strip() for part in options.split(","))):
        key, _, value = option.partition("=")
        if key not in fields or not value:
            raise ConfigError(
                f"pass {name} has no option {option}", where="--passes", instead=" or ".join(examples) or name
            )
        made = dataclasses.replace(made, **{key: _value(key, value, fields[key], f"{name}({option})")})
    return made


def _value(option: str, text: str, default: Any, where: str) -> Any:
    """The value of an option, of the type of its default; for hardware a device and the GB/s of its link."""
    if option == _HARDWARE:
        from fsdp_compile.cost.hardware import hardware

        device, _, gb_per_s = text.partition("/")
        try:
            return hardware(device, float(gb_per_s))
        except ValueError:
            instead = f"{_HARDWARE}={_EXAMPLE}"
            raise ConfigError(f"{text!r} is no device and GB/s", where=where, instead=instead) from None
    try:
        return int(text) if default is None else type(default)(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a value like {default!r}", where=where) from None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", instead="a file that holds the text of a graph") from error
