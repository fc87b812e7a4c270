"""`fsdp-compile` `calibrate`, `checkpoint` and `opt`."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsdp_compile.cli.checkpoint import step_folders
from fsdp_compile.cli.main import main
from fsdp_compile.cli.opt import _items, make_pass
from fsdp_compile.config.choices import DEFAULT_PASSES
from fsdp_compile.cost.calibrated import load_hardware
from fsdp_compile.passes.insert_collectives import InsertCollectives
from fsdp_compile.passes.schedule_prefetch import SchedulePrefetch
from tests.cli.conftest import Call
from tests.formats.samples import save_steps


def test_alone_it_measures_the_device_and_explain_takes_the_file(tmp_path: Path, call: Call) -> None:
    path = tmp_path / "hardware.json"
    said = call(f"calibrate --device cpu --seconds 1 --out {path}")
    assert "matmuls of float32" in said
    assert f"wrote {path}" in said
    assert load_hardware(path).cluster is not None


@pytest.mark.long
def test_below_torchrun_all_ranks_measure_and_one_of_each_host_writes(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ours = ["-m", "fsdp_compile.cli", "calibrate", "--device", "cpu", "--seconds", "2", "--out", str(path)]
    done = subprocess.run([*launcher, *ours], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote ") == 1
    assert "all-reduce over 2 ranks, 2 on one host" in done.stdout
    there = load_hardware(path)
    assert there.cluster is not None
    assert (there.cluster.ranks, there.local_size) == (2, 2)
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.pt"
    weight = torch.ones(3, 2)
    torch.save({"model": {"weight": weight, "tied": weight, "scale": torch.tensor(1.0).bfloat16()}, "epoch": 3}, path)
    return path


def test_info_shows_what_is_in_a_file(file: Path, call: Call) -> None:
    assert call(f"checkpoint info {file}").splitlines() == [
        f"{file}: a file of torch.save",
        "3 tensors, 1 other value, 26 bytes (24 bytes float32, 2 bytes bfloat16), 1 file",
        "model.weight  [3, 2]  float32",
        "model.tied    [3, 2]  float32, tied to model.weight",
        "model.scale   []      bfloat16",
        "epoch                 no tensor",
    ]
    (read,) = json.loads(call(f"checkpoint info --json {file}"))
    assert (read["format"], read["bytes"], read["files"], read["others"]) == ("torch", 26, ["a.pt"], ["epoch"])
    tied = {"name": "model.tied", "shape": [3, 2], "dtype": "float32", "bytes": 24, "tied_to": "model.weight"}
    assert read["tensors"][1] == tied


def test_the_steps_of_a_run_are_found_in_its_folder(tmp_path: Path) -> None:
    steps = [tmp_path / "checkpoints" / f"step-{number}" for number in (9, 10)]
    for step in steps:
        step.mkdir(parents=True)
    assert step_folders(tmp_path) == step_folders(tmp_path / "checkpoints") == steps


@pytest.mark.long
def test_the_steps_of_a_run_are_shown_and_verified(
    tmp_path: Path, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    save_steps(tmp_path)
    shown = call(f"checkpoint info {tmp_path}")
    assert f"{tmp_path}/step-000001: a step of fsdp-compile train, torch.distributed.checkpoint" in shown
    assert "steps that were done: 2\n" in shown
    first, second = call(f"checkpoint verify --finite {tmp_path}").splitlines()
    assert first.startswith(f"{tmp_path}/step-000001 is right: 8 tensors, ")
    assert first.endswith(", digests and checksums, all values finite")
    assert second.startswith(f"{tmp_path}/step-000002 is right: ")
    (tmp_path / "step-000001" / "__0_0.distcp").write_bytes(b"")
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    after = capsys.readouterr()
    assert f"{tmp_path}/step-000001/__0_0.distcp has 0 bytes" in after.err
    assert after.out.startswith(f"{tmp_path}/step-000002 is right: ")


def test_convert_says_what_it_wrote_and_left_out(file: Path, call: Call) -> None:
    target = file.parent / "hf"
    command = f"checkpoint convert {file} {target} --to safetensors"
    assert "instead: --part model" in call(command, status=2)
    written = call(f"{command} --part model --dtype bfloat16 --prefix all.")
    assert written == f"wrote {target}: 3 tensors, 14 bytes\n"
    assert "all.tied    [3, 2]  bfloat16, tied to all.weight" in call(f"checkpoint info {target}")
    assert f"{target} exists" in call(command, status=2)


def test_safetensors_that_are_not_installed_are_named(file: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    written = file.with_suffix(".safetensors")
    call(f"checkpoint convert {file} {written} --to safetensors --part model")
    monkeypatch.setattr("fsdp_compile.formats.files.find_spec", lambda _: None)
    folder = file.parent
    for line in (f"convert {file} {folder / 'b'} --to safetensors", f"convert {written} {folder / 'b'} --to dcp"):
        assert "pip install 'fsdp-compile[safetensors]'" in call(f"checkpoint {line}", status=2)
    assert "pip install 'fsdp-compile[safetensors]'" in call(f"checkpoint verify {written}", status=2)


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
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "graph.txt"
    path.write_text(GRAPH)
    return path


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("calibrate --seconds 0", "cannot measure for 0.0 s"),
        ("calibrate --seconds nan", "cannot measure for nan s"),
        ("calibrate --seconds inf", "cannot measure for inf s"),
        ("calibrate --out tests", "tests is a folder"),
        ("calibrate --out nowhere/hardware.json", "there is no folder nowhere"),
        (
            "checkpoint convert pyproject.toml b --to dcp --strip-prefx a.",
            "unknown argument --strip-prefx\n  instead: --strip-prefix",
        ),
        ("opt --passes buckt -", "there is no pass buckt\n  where: --passes\n  instead: bucket"),
        ("opt --passes bucket; -", "'bucket;' is not a list of passes"),
        ("opt --passes bucket,none -", "there is no pass none"),
        ("opt --passes schedule-prefetch(far=1) GRAPH", "instead: schedule-prefetch(distance=1)"),
        ("opt --passes schedule-prefetch(distance=x) GRAPH", "'x' is not a value like 1"),
        ("opt --passes schedule-prefetch(distance=1/2) GRAPH", "'1/2' is not a value like 1"),
        ("opt --passes bucket(size=1) GRAPH", "pass bucket has no option size=1"),
        ("opt --passes bucket(size=1) GRAPH", "instead: bucket(hardware=h100-sxm/50)"),
        ("opt --passes insert-collectives(far=1) GRAPH", "instead: insert-collectives"),
        ("opt --passes schedule-auto(hardware=h100-sxm) GRAPH", "instead: hardware=h100-sxm/50"),
        ("opt --passes schedule-auto(hardware=h100-sxm/fast) GRAPH", "'h100-sxm/fast' is no device and GB/s"),
        ("opt nowhere.txt", "cannot read nowhere.txt"),
    ],
)
def test_mistakes_are_explained(line: str, says: str, graph: Path, call: Call) -> None:
    assert says in call(line.replace("GRAPH", str(graph)), status=2)


def test_prints_the_graph_after_the_passes(graph: Path, call: Call) -> None:
    text = call(f"opt --passes insert-collectives,bucket {graph}")
    assert text.startswith("graph forward on cpu\n%w = input(role=flat, unit=layer) : f32[32]\n")
    assert "%wait_tensor_default_1 = wait(%getitem, role=gather_wait, unit=layer, of=[.weight]) : f32[64]\n" in text


def test_its_output_is_its_input(graph: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def passed(passes: str, text: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return call(f"opt --passes {passes} -")

    text = GRAPH
    for name in DEFAULT_PASSES:
        text = passed(name, text)
    assert passed("none", text) == text == call(f"opt {graph}")


@pytest.mark.parametrize(
    ("show", "line"),
    [("plans", "ReshardPlan: kept=[]"), ("diffs", f"-{GRAPH.splitlines()[4]}")],
)
def test_shows_plans_or_changes(show: str, line: str, graph: Path, call: Call) -> None:
    lines = call(f"opt --show {show} {graph}").splitlines()
    assert line in lines
    assert [text for text in lines if text.startswith("# ")] == [f"# {name}" for name in DEFAULT_PASSES]


def test_verifies_on_request(graph: Path, call: Call) -> None:
    assert call(f"opt --verify final {graph}")
    assert "%read" in call(f"opt --passes none --verify final {graph}", status=1)


def test_refuses_text_that_is_no_graph(graph: Path, call: Call) -> None:
    graph.write_text(GRAPH.replace("f32[3, 8]\nreturn", "f32[4, 99]\nreturn"))
    error = call(f"opt {graph}", status=2)
    assert "line 6: declared f32[4, 99], but aten.mm gives f32[3, 8]" in error


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
    text: str, passes: str, message: str, line: int, graph: Path, call: Call
) -> None:
    graph.write_text(text)
    said = call(f"opt --passes {passes} {graph}", status=1)
    assert message in said
    assert f'File "graph text", line {line}, in forward: {text.splitlines()[line - 1]}' in said


def test_an_error_of_a_pass_is_left_as_it_is_on_a_graph_as_it_requires(
    graph: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("inside")

    monkeypatch.setattr(SchedulePrefetch, "plan", fail)
    with pytest.raises(KeyError, match="inside"):
        call(f"opt --passes insert-collectives,schedule-prefetch {graph}")
    assert "markers-gone: %read" in call(f"opt --passes schedule-prefetch {graph}", status=1)
    monkeypatch.setattr(InsertCollectives, "plan", fail)
    with pytest.raises(KeyError, match="inside"):  # it takes markers
        call(f"opt --passes insert-collectives {graph}")


def test_passes_take_options() -> None:
    assert make_pass("schedule-prefetch", "distance=2") == SchedulePrefetch(distance=2)
    assert list(_items("bucket, schedule-prefetch(distance=2)")) == [
        ("bucket", ""),
        ("schedule-prefetch", "distance=2"),
    ]
    assert list(_items("none")) == []
