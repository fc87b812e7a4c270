"""What an import loads, and what is packaged."""

from __future__ import annotations

import ast
import inspect
import pydoc
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, entry_points
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_type

import pytest
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch

import fsdp_compile
from fsdp_compile.cli.main import main
from fsdp_compile.cli.opt import known_passes
from fsdp_compile.config import choices
from fsdp_compile.config.prefetch import named_rules
from fsdp_compile.cost.hardware import DEVICES, LINKS
from fsdp_compile.options import FSDPOptions
from fsdp_compile.pipeline import passes
from fsdp_compile.verify.check import Stage
from tests import long

ROOT = Path(__file__).parent.parent
COMMANDS = ("train", "checkpoint", "explain", "plan", "calibrate", "parity", "opt")
LOADED = """
import sys
print("LOADED", *sorted(sys.modules))
"""
CALL_MAIN = """
import sys
from fsdp_compile.cli.main import main
try:
    status = main(sys.argv[1:])
except SystemExit as ended:
    status = ended.code
print("STATUS", status)
"""


def _run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _loaded(code: str, *arguments: str) -> set[str]:
    """The modules of a new process after some code."""
    (line,) = [line for line in _run(code + LOADED, *arguments).splitlines() if line.startswith("LOADED ")]
    return set(line.split()[1:])


def _top(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


@pytest.mark.core
def test_importing_the_package_loads_nothing_else_and_registers_nothing_with_optimizers_and_modules() -> None:
    code = """
import sys
import torch
before = set(sys.modules)
import fsdp_compile
print(*set(sys.modules) - before)
from torch.nn.modules import module
fsdp_compile.fully_shard  # its first use imports the training wing
from torch.optim import optimizer
print([*optimizer._global_optimizer_pre_hooks, *optimizer._global_optimizer_post_hooks])
print([name for name, value in vars(module).items() if name.startswith("_global_") and "hooks" in name and value])
"""
    assert _run(code).split() == ["fsdp_compile", "[]", "[]"]
    for needs_none in ("import fsdp_compile", "from fsdp_compile import ConfigError, ParityError, RankFailedError"):
        assert "torch" not in _loaded(needs_none)


@pytest.mark.parametrize("name", fsdp_compile.__all__)
def test_a_public_name_is_what_its_home_defines(name: str) -> None:
    value = getattr(fsdp_compile, name)
    assert value.__name__ == name
    assert value.__module__ == fsdp_compile._HOMES[name]
    assert vars(fsdp_compile)[name] is value  # the second use costs what any attribute does


def test_type_checkers_see_the_same_names_in_the_same_homes() -> None:
    source = ast.parse(Path(fsdp_compile.__file__).read_text(encoding="utf-8"))
    (block,) = [n for n in source.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    imported = {
        alias.asname or alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == fsdp_compile._HOMES
    assert sorted(imported) == sorted(fsdp_compile.__all__)


def test_dir_star_imports_and_help_have_every_public_name() -> None:
    assert set(fsdp_compile.__all__) <= set(dir(fsdp_compile))
    found: dict[str, Any] = {}
    exec("from fsdp_compile import *", found)
    assert set(fsdp_compile.__all__) <= set(found)
    text = pydoc.render_doc(fsdp_compile, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
    assert [name for name in fsdp_compile.__all__ if name not in text] == []
    assert next(iter(inspect.signature(fsdp_compile.fully_shard).parameters)) == "module"


def test_a_name_that_is_missing_is_named_as_python_does_it() -> None:
    with pytest.raises(AttributeError, match=r"^module 'fsdp_compile' has no attribute 'fully_shrad'$") as caught:
        fsdp_compile.fully_shrad  # type: ignore[attr-defined]  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("fully_shrad", fsdp_compile)
    with pytest.raises(ImportError, match="cannot import name 'fully_shrad' from 'fsdp_compile'"):
        exec("from fsdp_compile import fully_shrad")
    assert fsdp_compile.errors.ConfigError is fsdp_compile.ConfigError  # an imported module is an attribute as ever


IMPORTS_OF_EXPLAIN = """
import fsdp_compile
import fsdp_compile.explain
import fsdp_compile.explain.plan
import fsdp_compile; fsdp_compile.explain; import fsdp_compile.explain.api
from fsdp_compile.explain import Plan; import fsdp_compile
import fsdp_compile; from fsdp_compile.explain.api import explain
from fsdp_compile import *; import fsdp_compile
"""
EACH_IN_A_FORK = """
import inspect, os, sys
import torch, torch._dynamo, torch._inductor.compile_fx, torch.distributed.fsdp, torch.distributed.tensor
for line in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        right = False
        try:
            exec(line)
            from fsdp_compile import explain
            from fsdp_compile.explain import Plan, explain as other
            right = fsdp_compile.explain is explain is other and inspect.isfunction(explain)
        finally:
            os._exit(not right)
    if os.waitpid(child, 0)[1]:
        print(line)
"""


@pytest.mark.long
def test_explain_is_the_function_in_whatever_order_modules_are_imported() -> None:
    assert _run(EACH_IN_A_FORK, *IMPORTS_OF_EXPLAIN.strip().splitlines()) == ""


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_loads_no_torch(command: str | None) -> None:
    asked = [] if command is None else [command]
    loaded = _loaded(CALL_MAIN, *asked, "--help")
    assert _top(loaded) & {"torch", "rich", "sympy", "numpy"} == set()


MISTAKES = """
train --batch-sise 8
train --ranks 0
train --ranks 3
train --learning-rate -1
train --heads 5
train --device tpu
train --mixed-precision fp8
train --resume nowhere
train --resume --out folder
train --ranks 2 --out pyproject.toml/run
explain --wrold-size 8
explain --world-size 0
explain --param-dtype float8
explain --prefetch bad
explain --lower fast
explain --device h10
explain --link none
explain --link 0
explain --hardware nowhere.json
explain --hardware pyproject.toml --link 5
calibrate --secnods 5
calibrate --seconds 0
calibrate --out nowhere/hardware.json
parity --stesp 1
parity --reference fsdp3
parity --level exact
parity --accumulation never
parity --steps 0
parity --world-size 3 --replicas 2
parity --reduce-dtype int8
checkpoint info nowhere
checkpoint info --jsno pyproject.toml
checkpoint verify nowhere
checkpoint convert nowhere target --to dcp
checkpoint convert pyproject.toml README.md --to dcp
checkpoint convert pyproject.toml nowhere/target --to dcp
checkpoint convert pyproject.toml target --to gguf
checkpoint convert pyproject.toml target --to dcp --dtype int8
checkpoint convert pyproject.toml target --to dcp --drop-others
checkpoint convert pyproject.toml target --to safetensors --max-shard-gb 0
checkpoint sharpen
opt nowhere.txt
opt --passes buckt -
opt --passes bucket; -
opt --verify sometimes -
opt --show nothing -
sharpen
"""


_LINES = MISTAKES.strip().splitlines()


@long.parametrize("line", _LINES, always=_LINES[::4])
def test_a_mistake_is_refused_without_torch(line: str) -> None:
    code = f"{CALL_MAIN}\nassert status == 2, status"
    assert _top(_loaded(code, *line.split())) & {"torch", "rich", "sympy", "numpy"} == set()


def test_names_that_are_known_without_torch_are_those_that_exist() -> None:
    assert tuple(DEVICES) == choices.DEVICES
    assert tuple(LINKS) == choices.LINKS
    assert tuple(stage.value for stage in Stage) == choices.STAGES
    assert tuple(one.name for one in passes(FSDPOptions())) == choices.DEFAULT_PASSES
    assert sorted(known_passes()) == sorted(choices.PASSES)
    assert tuple(rule.name for rule in BackwardPrefetch) == choices.BACKWARD_PREFETCH[:-1]
    rules = [named_rules(name) for name in choices.SHORT_FORMS]
    assert None not in rules
    assert len({str(rule) for rule in rules}) == len(choices.SHORT_FORMS)


if TYPE_CHECKING:  # what type checkers see of names that are loaded at their first use; mypy runs over this file

    def _types(model: nn.Linear) -> None:
        from fsdp_compile.explain.plan import Plan

        assert_type(fsdp_compile.explain(model), Plan)
        assert_type(fsdp_compile.FSDPOptions().sync_module_states, bool)
        assert_type(fsdp_compile.ConfigError("what").instead, str | None)
        assert_type(fsdp_compile.FSDPPrefetch(forward=True).limit_all_gathers, bool)
        assert_type(fsdp_compile.fully_shard(model), nn.Linear)
        fsdp_compile.fully_shard(model, no_such_argument=1)  # type: ignore[call-arg]
        fsdp_compile.units(3)  # type: ignore[arg-type]


@pytest.mark.long
def test_the_first_compile_by_name_imports_the_backend() -> None:
    compiled = "import torch; model = torch.compile(torch.nn.Linear(2, 2), backend='fsdp')"
    assert _run(f"{compiled}; print(bool(model._compiled_call_impl))").strip() == "True"


def test_the_installed_version_is_the_declared_one(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert distribution("fsdp-compile").version == fsdp_compile.__version__ == project["version"]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"fsdp-compile {project['version']}\n"


def test_only_the_extras_bring_optional_dependencies_and_the_package_is_typed() -> None:
    assert files("fsdp_compile").joinpath("py.typed").is_file()
    requires = distribution("fsdp-compile").requires or []
    always = {line.split(">")[0] for line in requires if "extra ==" not in line}
    assert always == {"torch", "sympy", "filelock", "rich"}
    extras = set(distribution("fsdp-compile").metadata.get_all("Provides-Extra") or [])
    assert extras == {"test", "plot", "safetensors", "lint", "frameworks", "cuda-code", "docs"}


@pytest.mark.core
def test_entry_points_are_declared_and_load() -> None:
    for group, name, value in (
        ("torch_dynamo_backends", "fsdp", "fsdp_compile.backend:fsdp"),
        ("console_scripts", "fsdp-compile", "fsdp_compile.cli.main:main"),
    ):
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
    assert _run(code).split() == ["True", "False", "fsdp_compile.backend"]


def test_constraints_pin_a_supported_torch() -> None:
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == ["torch==2.13.0"]
