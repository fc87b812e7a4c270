"""`fsdp-compile explain`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_compile.cli.arguments import show
from tests.cli.conftest import Call

_MODULE = """
import torch
from tests.models.round_sizes import Stack

def make():
    return Stack(), (torch.zeros(64, 256),)

def make_narrow():
    return Stack().to(torch.bfloat16), (torch.zeros(64, 256, dtype=torch.bfloat16),)

def wrong():
    return Stack()
"""


@pytest.fixture(autouse=True)
def _explained_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "explained_here.py").write_text(_MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.long
def test_the_built_in_model_is_explained_at_once(call: Call) -> None:
    out = call("explain --world-size 4 --lower eager")
    verdict, setting, *_ = out.splitlines()
    assert verdict.startswith("fits: ")
    assert setting.startswith("Llama on 4 ranks, h100-sxm, nvlink4")  # all on one host
    assert max(map(len, out.splitlines())) <= 80


def test_a_model_of_the_users_is_explained_as_json_and_page(tmp_path: Path, call: Call) -> None:
    page = tmp_path / "p.html"
    line = f"explain explained_here:make --world-size 16 --lower eager --link 25 --device a100 --json --html {page}"
    data = json.loads(call(line))
    assert (data["title"], data["world_size"]) == ("Stack", 16)
    assert (data["hardware"]["link"]["rate"]["value"], data["hardware"]["device"]["name"]) == (25e9, "a100-sxm")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_parameters_are_gathered_in_the_dtype_that_was_asked_for(call: Call) -> None:
    for dtype in ("float32", "bfloat16"):
        data = json.loads(call(f"explain explained_here:make_narrow --lower eager --param-dtype {dtype} --json"))
        sent = [each for graph in data["graphs"] for each in graph["collectives"]]
        assert {each["dtype"] for each in sent if each["kind"] == "all-gather"} == {dtype}


def test_a_terminal_shows_the_parts_of_a_report_with_all_brackets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show("the text\n", ["blocks[bold]"], None)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show("the text\n", ["blocks[bold]"], None)
    show("the text\n", ["blocks[bold]"], "{}")
    assert capsys.readouterr().out == "the text\nblocks[bold]\n{}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("nowhere:make", "cannot find nowhere:make"),
        ("explained_here:absent", "cannot find explained_here:absent"),
        ("explained_here:wrong", "a function without arguments"),
        ("explained_here", "explained_here does not name a module and a function"),
        ("explained_here:torch", "explained_here:torch is a module"),
        ("--device h10", "there is no device 'h10'\n  where: --device\n  instead: one of b200, h200-sxm, h100-sxm"),
        ("--link ib", "there is no link 'ib'\n  where: --link\n  instead: one of ib-400"),
        ("--link ethernet-1", "the 8 ranks share a host of 8 and send on its nvlink4; ethernet-1 would be between"),
        ("--ranks-per-host 0", "a host cannot have 0 ranks\n  where: --ranks-per-host"),
        ("--world-size 0", "cannot plan for 0 ranks\n  where: --world-size\n"),
        (f"--hardware {__file__}", "where: --hardware\n"),
        ("--hardware nowhere.json", "there is no file nowhere.json"),
        ("--hardware pyproject.toml --link 5", "the file says which device and links there are"),
    ],
)
def test_mistakes_are_explained(arguments: str, says: str, call: Call) -> None:
    error = call(f"explain {arguments}", status=2)
    assert says in error
    assert "(" not in error.partition("where: ")[2].partition("\n")[0]  # a flag, no argument of Python


@pytest.mark.long
def test_every_kind_of_prefetching_is_explained(call: Call) -> None:
    def starts(prefetch: str) -> list[tuple[str, int]]:
        data = json.loads(call(f"explain explained_here:make --lower eager --link 1 --prefetch {prefetch} --json"))
        return [(c["kind"], c["start"]["index"]) for graph in data["graphs"] for c in graph["collectives"]]

    found = {name: starts(name) for name in ("auto", "1", "BACKWARD_POST", "none+forward_prefetch")}
    assert len({str(each) for each in found.values()}) == len(found)
    assert sum(kind == "all-gather" for kind, _ in found["1"]) == 6


def test_a_wrong_prefetch_is_refused_with_all_names(call: Call) -> None:
    error = call("explain --prefetch bad", status=2)
    assert "'prefetch' cannot be 'bad'" in error
    assert all(name in error for name in ("auto", "BACKWARD_PRE", "BACKWARD_POST", "none", "forward_prefetch"))
