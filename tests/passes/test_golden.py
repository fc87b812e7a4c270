"""Every pass does exactly what its golden cases say.

A case is a file `tests/golden/<pass>/<what it shows>.txt`: why it matters, the options of the pass, a graph, the graph
after the pass, and the plan. `pytest --update-golden` writes the last two as they are now.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_compile.cli.opt import apply_passes, known_passes, make_pass
from fsdp_compile.ir.text.parser import parse_graph
from fsdp_compile.ir.text.printer import format_graph
from tests.fake_world import fake_world

GOLDEN = Path(__file__).parents[1] / "golden"
BAR = "-----\n"
CASES = sorted(GOLDEN.glob("*/*"))


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    """Collectives of a program's own are sent in a group that torch knows, here "0"."""
    with fake_world(2):
        yield


@dataclasses.dataclass(frozen=True)
class Case:
    """One file: its two comment lines without their marks, and its parts."""

    why: str
    options: str
    before: str
    after: str
    plan: str

    @property
    def text(self) -> str:
        head = f"# why: {self.why}\n# options: {self.options}\n"
        return head + BAR.join((self.before, self.after, self.plan))


def read_case(path: Path) -> Case:
    text = path.read_text(encoding="utf-8")
    head = re.match(r"# why: (.+)\n# options: (.+)\n", text)
    assert head, f"{path} must start with `# why: ...` and `# options: ...`"
    before, after, plan = (*text[head.end() :].split(BAR), "", "")[:3]
    return Case(head[1], head[2], before, after, plan)


def run_case(name: str, case: Case) -> Case:
    graph_pass = make_pass(name, "" if case.options == "none" else case.options)
    step = parse_graph(case.before)
    before = format_graph(step)
    graph_pass.plan(step)
    assert format_graph(step) == before, "a plan changes nothing"
    (applied,) = apply_passes(step, [graph_pass])
    return dataclasses.replace(case, before=before, after=applied.graph, plan=applied.plan)


@pytest.mark.core
@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_golden(path: Path, request: pytest.FixtureRequest) -> None:
    found = run_case(path.parent.name, read_case(path))
    assert format_graph(parse_graph(found.after)) == found.after, "what a pass makes reads back"
    if request.config.getoption("--update-golden"):
        path.write_text(found.text, encoding="utf-8")
    assert read_case(path) == found, "the pass does something else now; --update-golden if that is meant"


def test_every_pass_has_cases_and_every_case_a_pass() -> None:
    assert {path.parent.name for path in CASES} == set(known_passes())
    assert [path for path in CASES if path.suffix != ".txt"] == []
    assert [path for path in GOLDEN.iterdir() if not path.is_dir()] == []


def test_cases_are_small_and_say_why() -> None:
    for path in CASES:
        case = read_case(path)
        assert len(case.before.splitlines()) <= 40, path
        assert not case.why.endswith("."), path
