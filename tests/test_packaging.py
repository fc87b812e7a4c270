"""What an installed package declares: version, entry points, types."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import distribution, entry_points
from importlib.resources import files
from pathlib import Path

import pytest

import fsdp_compile
from fsdp_compile.cli.main import main

ROOT = Path(__file__).parent.parent


def _python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_installed_version_is_the_declared_one(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert distribution("fsdp-compile").version == fsdp_compile.__version__ == project["version"]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"fsdp-compile {project['version']}\n"


def test_only_the_extras_bring_optional_dependencies() -> None:
    requires = distribution("fsdp-compile").requires or []
    always = {line.split(">")[0] for line in requires if "extra ==" not in line}
    assert always == {"torch", "sympy", "filelock", "rich"}
    assert set(distribution("fsdp-compile").metadata.get_all("Provides-Extra") or []) == {
        "test",
        "plot",
        "safetensors",
        "lint",
        "frameworks",
        "cuda-code",
        "docs",
    }


def test_the_package_says_that_it_is_typed() -> None:
    assert files("fsdp_compile").joinpath("py.typed").is_file()


@pytest.mark.core
@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("torch_dynamo_backends", "fsdp", "fsdp_compile.backend:fsdp"),
        ("console_scripts", "fsdp-compile", "fsdp_compile.cli.main:main"),
    ],
)
def test_an_entry_point_is_declared_and_loads(group: str, name: str, value: str) -> None:
    (entry_point,) = entry_points(group=group, name=name)
    assert entry_point.value == value
    assert callable(entry_point.load())


@pytest.mark.long
@pytest.mark.core
def test_torch_lists_the_backend_without_importing_the_package_and_finds_it_by_its_name() -> None:
    code = (
        "import sys, torch._dynamo\n"
        "from torch._dynamo.backends.registry import lookup_backend\n"
        "print('fsdp' in torch._dynamo.list_backends(), 'fsdp_compile' in sys.modules)\n"
        "print(getattr(lookup_backend('fsdp'), '__module__', None))"
    )
    assert _python(code).split() == ["True", "False", "fsdp_compile.backend"]


def test_constraints_pin_a_supported_torch() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == ["torch==2.13.0"]
