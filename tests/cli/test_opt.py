"""`fsdp-compile opt` on the text of a graph."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from fsdp_compile.cli.main import main
from fsdp_compile.cli.opt import default_passes, read_passes
from fsdp_compile.errors import ConfigError
from fsdp_compile.passes.schedule_prefetch import SchedulePrefetch

GRAPH = """\
graph forward on cpu
%w = input(role=flat, unit=layer) : f32[32]
  .weight: offset=0 extent=32 shape=8x8 dim=0 over=fsdp.shard.0/2 param=float32 reduce=float32 reshard=after_forward
%x = input() : f32[3, 8]
%read = fsdp_compile.unshard(%w, slot=.weight) : f32[8, 8]
%y = aten.mm(%x, %read) : f32[3, 8]
return (%y,)
"""


@pytest.fixture
def graph(tmp_path: Path) -> str:
    path = tmp_path / "graph.txt"
    path.write_text(GRAPH)
    return str(path)


def test_prints_the_graph_after_the_passes(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["opt", "--passes", "insert-collectives,bucket", graph]) == 0
    text = capsys.readouterr().out
    assert text.startswith("graph forward on cpu\n%w = input(role=flat, unit=layer) : f32[32]\n")
    assert "%wait_tensor_default_1 = wait(%getitem, role=gather_wait, unit=layer, of=[.weight]) : f32[64]\n" in text


def test_its_output_is_its_input(
    graph: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["opt", graph]) == 0
    at_once = capsys.readouterr().out
    for name in default_passes():
        assert main(["opt", "--passes", name, graph]) == 0
        monkeypatch.setattr("sys.stdin", io.StringIO(capsys.readouterr().out))
        graph = "-"
    assert main(["opt", "--passes", "none", "-"]) == 0
    assert capsys.readouterr().out == at_once


def test_json_has_the_graph_plan_and_changes_of_every_pass(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["opt", "--json", graph]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["passes"]] == list(default_passes())
    assert found["passes"][-1]["graph"] == found["graph"]
    assert found["passes"][0]["plan"].startswith("InsertPlan")
    assert "removed 1: %read\n" in found["passes"][0]["diff"]


@pytest.mark.parametrize(("show", "line"), [("plans", "ReshardPlan: kept=[]"), ("diffs", "fsdp_compile.reshard +1")])
def test_shows_plans_or_changes(show: str, line: str, graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["opt", "--show", show, graph]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert line in lines
    assert [text for text in lines if text.startswith("# ")] == [f"# {name}" for name in default_passes()]


def test_verifies_on_request(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["opt", "--verify", "final", graph]) == 0
    assert main(["opt", "--passes", "none", "--verify", "final", graph]) == 1
    assert "%read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--passes", "buckt"], "there is no pass buckt\n  where: --passes\n  instead: bucket"),
        (["--passes", "bucket;"], "'bucket;' is not a list of passes"),
        (["--passes", "schedule-prefetch(far=1)"], "instead: schedule-prefetch(distance=1)"),
        (["--passes", "schedule-prefetch(distance=x)"], "'x' is not a value like 1"),
        (["--passes", "bucket(size=1)"], "pass bucket has no option size=1"),
        (["--passes", "bucket(size=1)"], "instead: bucket(hardware=h100-sxm/50)"),
        (["--passes", "schedule-auto(hardware=h100-sxm)"], "instead: hardware=h100-sxm/50"),
        (["--passes", "schedule-auto(hardware=h100-sxm/fast)"], "'h100-sxm/fast' is no device and GB/s"),
        (["--passes", "schedule-prefetch(distance=1/2)"], "'1/2' is not a value like 1"),
    ],
)
def test_refuses_passes_that_do_not_exist(
    arguments: list[str], message: str, graph: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["opt", *arguments, graph]) == 2
    assert message in capsys.readouterr().err


def test_refuses_text_that_is_no_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graph.txt"
    assert main(["opt", str(path)]) == 2
    assert f"cannot read {path}" in capsys.readouterr().err
    path.write_text(GRAPH.replace("f32[3, 8]\nreturn", "f32[4, 99]\nreturn"))
    assert main(["opt", str(path)]) == 2
    assert "line 6, column 27: declared f32[4, 99], but aten.mm gives f32[3, 8]" in capsys.readouterr().err


UNWAITED = GRAPH.replace(
    "%read = fsdp_compile.unshard(%w, slot=.weight) : f32[8, 8]",
    "%ag = all_gather(%w, 2, 'fsdp.shard.0', role=gather, unit=layer, of=[.weight]) : f32[64]\n"
    "%read = aten.view(%ag, [8, 8]) : f32[8, 8]",
)
UNREAD = UNWAITED.replace(
    "%read = aten.view(%ag, [8, 8])",
    "%wait = wait(%ag, role=gather_wait, unit=layer, of=[.weight]) : f32[64]\n%read = aten.view(%wait, [8, 8])",
)


@pytest.mark.parametrize(
    ("text", "passes", "message", "line"),
    [
        (UNWAITED, "bucket", "wrong after the text was read\n  gather-waited: %read uses %ag", 6),
        (UNWAITED, "schedule-auto", "gather-waited: %ag nobody waits for this all-gather", 5),
        (UNWAITED, "insert-collectives,bucket", "wrong after insert-collectives\n  gather-waited", 5),
        (UNREAD, "bucket", "%wait leads to no full parameter", 6),
    ],
)
def test_a_graph_that_a_pass_cannot_take_is_refused_with_its_line(
    text: str, passes: str, message: str, line: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(text)
    assert main(["opt", "--passes", passes, str(path)]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert f'File "graph text", line {line}, in forward: {text.splitlines()[line - 1]}' in said


def test_an_error_of_a_pass_on_a_right_graph_is_left_as_it_is(graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("inside")

    monkeypatch.setattr(SchedulePrefetch, "plan", fail)
    with pytest.raises(KeyError, match="inside"):
        main(["opt", "--passes", "insert-collectives,schedule-prefetch", graph])


def test_passes_take_options() -> None:
    assert read_passes("schedule-prefetch(distance=2)") == [SchedulePrefetch(distance=2)]
    assert [one.name for one in read_passes("bucket, schedule-reduce")] == ["bucket", "schedule-reduce"]
    assert read_passes("none") == []
    with pytest.raises(ConfigError, match="there is no pass none"):
        read_passes("bucket,none")
