"""Rules catch broken graphs, stand by themselves, and say what is wrong where."""

from __future__ import annotations

import ast
import inspect
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import fsdp_compile.verify
from fsdp_compile.errors import InvariantError
from fsdp_compile.ir.graph import Phase, Role, Stage, StepGraph
from fsdp_compile.ir.source_line import source_line
from fsdp_compile.verify.check import RULES, check, complaints
from fsdp_compile.verify.facts import Limits
from fsdp_compile.verify.report import NEIGHBOURS, SHOWN, describe
from fsdp_compile.verify.trace_elements import Step, coordinates, linear, moved
from tests.verify import breaks, gradient_breaks, joined_breaks, memory_breaks  # noqa: F401  all add to BREAKS
from tests.verify.breaks import BREAKS, Break
from tests.verify.graphs import graph


@pytest.mark.parametrize("broken", BREAKS, ids=[b.name for b in BREAKS])
def test_a_broken_graph_is_caught_by_its_rule_at_its_node(broken: Break) -> None:
    step = broken.graph()
    assert complaints(step, stage=broken.stage) == []

    named = broken.edit(step)

    found = complaints(step, stage=broken.stage, limits=broken.limits)
    assert any(c.rule == broken.rule and c.node is named and broken.says in c.what for c in found), found


@pytest.mark.parametrize("rule", RULES, ids=[r.name for r in RULES])
def test_without_a_rule_some_broken_graph_passes(rule: object) -> None:
    others = [r for r in RULES if r is not rule]
    unnoticed = []
    for broken in (b for b in BREAKS if b.rule == rule.name):  # type: ignore[attr-defined]
        step = broken.graph()
        broken.edit(step)
        if not complaints(step, stage=broken.stage, limits=broken.limits, rules=others):
            unnoticed.append(broken.name)
    assert unnoticed


PACKAGE = Path(inspect.getfile(fsdp_compile.verify)).parent
FILES = sorted(PACKAGE.rglob("*.py"))
JUDGED = ("fsdp_compile.passes", "fsdp_compile.ir.queries", "fsdp_compile.ir.edit", "fsdp_compile.layout.messages")
DOCUMENT = PACKAGE.parent.parent / "docs" / "invariants.md"


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(PACKAGE)) for p in FILES])
def test_no_file_of_the_verifier_imports_what_passes_decide_with(path: Path) -> None:
    imported = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            imported.append(node.module or "")
        elif isinstance(node, ast.Import):
            imported.extend(alias.name for alias in node.names)
    assert [name for name in imported if name.startswith(JUDGED)] == []


def test_rules_have_names_of_their_own_and_hold_at_the_end() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert all(Stage.FINAL in rule.stages for rule in RULES)


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_the_documentation_has_a_section_on_each_rule(rule: str) -> None:
    assert f"\n## {rule}\n" in DOCUMENT.read_text()


def test_the_documentation_has_no_section_on_a_rule_that_is_gone() -> None:
    sections = [line.removeprefix("## ") for line in DOCUMENT.read_text().splitlines() if line.startswith("## ")]
    assert [name for name in sections if "-" in name and name not in {r.name for r in RULES}] == []


def refused(step: StepGraph, **how: Any) -> InvariantError:
    with pytest.raises(InvariantError) as caught:
        check(step, **how)
    return caught.value


def test_rule_node_pass_and_hint_are_named() -> None:
    step = graph(Phase.BACKWARD)
    named = breaks.gradient_reduced_twice(step)
    error = refused(step, after="wrong-pass")
    assert "the backward graph is wrong after wrong-pass" in error.what
    assert f"reduced-once: %{named} reduces the gradient of blocks.0." in error.what
    assert "reduced-once: sum the gradients of all reads first" in str(error.instead)


def test_the_users_line_and_three_nodes_on_either_side_are_shown_with_types() -> None:
    step = graph(Phase.FORWARD)
    use = breaks.unfinished_message_read(step)
    error = refused(step)
    lines = str(error.where).splitlines()
    marked = lines.index(f"    > {describe(use)}")
    nodes = list(step.graph.nodes)
    place = nodes.index(use)
    assert lines[marked - NEIGHBOURS].endswith(describe(nodes[place - NEIGHBOURS]))
    assert lines[marked + NEIGHBOURS].endswith(describe(nodes[place + NEIGHBOURS]))
    assert ": float32[2, 8192]" in lines[marked]
    assert "{copy_out of blocks.2}" in lines[marked]
    assert "tests/models/layers.py" in str(error)
    assert "this.down(F.gelu(this.up(this.norm(x))))" in source_line(use)


def test_only_the_first_complaints_are_shown_and_the_rest_is_counted() -> None:
    step = graph(Phase.FORWARD)
    for node in list(step.nodes(Role.RESHARD)):
        step.graph.erase_node(node)
    memory_breaks.marker_left(step)
    memory_breaks.record_forgotten(step)
    _, *shown, rest = refused(step).what.splitlines()
    assert len(shown) == SHOWN
    assert "more (" in rest
    assert "no-use-after-reshard" in rest


def test_a_budget_in_bytes_names_who_holds_how_much() -> None:
    said = str(refused(graph(Phase.FORWARD), limits=Limits(unsharded_bytes=200_000)))
    assert re.search(r"blocks\.0 [\d,]+, blocks\.1 [\d,]+", said)
    assert "the budget is 200,000 bytes" in said


aten = torch.ops.aten
MOVES: list[tuple[str, Any, tuple[int, ...], tuple[Any, ...]]] = [
    ("view", aten.view.default, (4, 6), ([3, 8],)),
    ("clone", aten.clone.default, (4, 6), ()),
    ("cast", torch.ops.prims.convert_element_type.default, (4, 6), (torch.float64,)),
    ("slice", aten.slice.Tensor, (4, 6), (1, 2, 5)),
    ("slice-from-the-end", aten.slice.Tensor, (4, 6), (0, -3, 9223372036854775807)),
    ("slice-with-a-step", aten.slice.Tensor, (4, 6), (1, 1, 6, 2)),
    ("slice-of-all", aten.slice.Tensor, (4, 6), ()),
    ("permute", aten.permute.default, (2, 3, 4), ([2, 0, 1],)),
    ("expand", aten.expand.default, (1, 6), ([3, 6],)),
    ("expand-to-more-dimensions", aten.expand.default, (4, 1), ([2, 4, 3],)),
    ("pad", aten.constant_pad_nd.default, (4, 6), ([1, 2, 0, 3],)),
    ("cut-by-negative-padding", aten.constant_pad_nd.default, (4, 6), ([-1, 0],)),
]


def _node(operator: Any, shape: tuple[int, ...], arguments: tuple[Any, ...]) -> tuple[fx.Node, torch.Tensor]:
    """A node that applies an operator, and its value where every element of its input is its own index plus one."""
    graph = fx.Graph()
    source = graph.placeholder("source")
    source.meta["val"] = torch.arange(1.0, math.prod(shape) + 1).view(shape)
    node = graph.call_function(operator, (source, *arguments))
    node.meta["val"] = operator(source.meta["val"], *arguments)
    return node, node.meta["val"].reshape(-1)


@pytest.mark.parametrize(("name", "operator", "shape", "arguments"), MOVES, ids=[m[0] for m in MOVES])
def test_each_element_is_found_where_the_operator_took_it(
    name: str, operator: Any, shape: tuple[int, ...], arguments: tuple[Any, ...]
) -> None:
    node, values = _node(operator, shape, arguments)
    for index, value in enumerate(values.tolist()):
        step = moved(node, index)
        assert step == (Step(None, 0) if value == 0 else Step(node.args[0], int(value) - 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_each_element_of_a_concatenation_is_found_in_its_part(dim: int) -> None:
    graph = fx.Graph()
    parts = [graph.placeholder(name) for name in "ab"]
    for part, first in zip(parts, (0.0, 100.0), strict=True):
        part.meta["val"] = torch.arange(first, first + 12).view(3, 4)
    node = graph.call_function(aten.cat.default, (parts, dim))
    node.meta["val"] = torch.cat([part.meta["val"] for part in parts], dim)
    for index, value in enumerate(node.meta["val"].reshape(-1).tolist()):
        assert moved(node, index) == Step(parts[int(value >= 100)], int(value) % 100)


def test_what_computes_or_is_a_constant_other_than_zero_ends_the_trail() -> None:
    node, _ = _node(aten.neg.default, (4,), ())
    assert moved(node, 0) is None
    constant = fx.Graph().call_function(aten.full.default, ([4], 1))
    constant.meta["val"] = torch.ones(4)
    assert moved(constant, 0) is None


def test_places_outside_of_a_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="fewer elements"):
        coordinates(12, (3, 4))
    with pytest.raises(ValueError, match="smaller"):
        linear((0, 4), (3, 4))
