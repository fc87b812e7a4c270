"""`fsdp-compile explain`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_compile.cli.main import main

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


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "explained_here.py").write_text(_MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "explained_here"


@pytest.mark.long
def test_the_built_in_model_is_explained_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--world-size", "4", "--lower", "eager"]) == 0
    out = capsys.readouterr().out
    verdict, setting, *_ = out.splitlines()
    assert verdict.startswith("fits: ")
    assert setting.startswith("Llama on 4 ranks, h100-sxm, nvlink4")  # all on one host
    assert max(map(len, out.splitlines())) <= 80


def test_a_model_of_the_users_is_explained_as_json_and_page(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html = tmp_path / "p.html"
    argv = f"explain {module}:make --world-size 16 --lower eager --link 25 --device a100-sxm --json".split()
    assert main([*argv, "--html", str(html)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["title"], data["world_size"]) == ("Stack", 16)
    assert data["hardware"]["link"]["rate"]["value"] == 25e9
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_parameters_are_gathered_in_the_dtype_that_was_asked_for(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for dtype in ("float32", "bfloat16"):
        assert main(["explain", f"{module}:make_narrow", "--lower", "eager", "--param-dtype", dtype, "--json"]) == 0
        graphs = json.loads(capsys.readouterr().out)["graphs"]
        sent = [each for graph in graphs for each in graph["collectives"]]
        assert {each["dtype"] for each in sent if each["kind"] == "all-gather"} == {dtype}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nowhere:make"], "cannot find nowhere:make"),
        (["explained_here:absent"], "cannot find explained_here:absent"),
        (["explained_here:wrong"], "a function without arguments"),
        (["explained_here"], "explained_here does not name a module and a function"),
        (["explained_here:torch"], "explained_here:torch is a module"),
        (
            ["--device", "h10"],
            "there is no device 'h10'\n  where: --device\n  instead: one of b200, h200-sxm, h100-sxm",
        ),
        (["--link", "ib"], "there is no link 'ib'\n  where: --link\n  instead: one of ib-400"),
        (
            ["--link", "ethernet-1"],
            "the 8 ranks share a host of 8 and send on its nvlink4; ethernet-1 would be between",
        ),
        (["--ranks-per-host", "0"], "a host cannot have 0 ranks\n  where: --ranks-per-host"),
        (["--hardware", __file__], "where: --hardware\n"),
        (["--world-size", "0"], "cannot plan for 0 ranks\n  where: --world-size\n"),
    ],
)
def test_mistakes_are_explained(argv: list[str], says: str, module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *argv]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "(" not in error.partition("where: ")[2].partition("\n")[0]  # a flag, no argument of Python


@pytest.mark.long
def test_every_kind_of_prefetching_is_explained(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    def starts(prefetch: str) -> list[tuple[str, int]]:
        argv = ["explain", f"{module}:make", "--lower", "eager", "--link", "1", "--prefetch", prefetch, "--json"]
        assert main(argv) == 0
        graphs = json.loads(capsys.readouterr().out)["graphs"]
        return [(c["kind"], c["start"]["index"]) for graph in graphs for c in graph["collectives"]]

    found = {name: starts(name) for name in ("auto", "1", "BACKWARD_POST", "none+forward_prefetch")}
    assert len({str(each) for each in found.values()}) == len(found)
    assert sum(kind == "all-gather" for kind, _ in found["1"]) == 6


def test_a_wrong_prefetch_is_refused_with_all_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--prefetch", "bad"]) == 2
    error = capsys.readouterr().err
    assert "'prefetch' cannot be 'bad'" in error
    assert all(name in error for name in ("auto", "BACKWARD_PRE", "BACKWARD_POST", "none", "forward_prefetch"))
