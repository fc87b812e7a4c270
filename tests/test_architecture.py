"""The package's layers, what a whole process shares, and where tricks may stand, as its sources say.

An import goes down one of two wings: graphs (no `nn.Module`, nothing that a process shares), or training (no
`torch.fx`). They stand on one ground floor and meet in `capture` and above it.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fsdp_compile"
FLOORS = [
    set(floor.split())
    for floor in """
        errors progress _torch
        layout
        ops
        config comm formats
        ir fsdp2
        cost sharding
        planner verify
        options
        partition passes state optim
        artifacts
        pipeline
        capture
        lower
        backend
        explain
        parity training integrations calibrate search
        __init__
        cli
    """.strip().splitlines()
]
"""Folders and files of the package, lowest first; those of one floor do not see each other."""
GRAPHS = {"ir", "cost", "planner", "verify", "options", "partition", "passes", "artifacts", "pipeline"}
TRAINING = {"fsdp2", "sharding", "state", "optim"}
SHARED_BY_A_PROCESS = {
    "capture/forms.py": {"_divided"},  # compiles are the process's
    "capture/unaveraged.py": {"_checked", "sharded", "waiting"},  # compiles and optimizers are the process's
    "comm/dtensor_layouts.py": {"_by_key"},  # calls in graphs name layouts
    "comm/failures.py": {"_last"},  # a world is the process's
    "comm/groups.py": {"aliases", "made_groups"},  # torch's own names of groups are the process's
    "fsdp2/accumulation.py": {"_plain_inside"},  # a plain model has no state of its own yet
    "fsdp2/buffers.py": {"read_in_eval"},  # graphs do not tell whose buffers they read
    "fsdp2/edge.py": {"_produced"},  # a backward of autograd is the process's
    "fsdp2/module_class.py": {"_classes"},  # a cache: the same class for the same reads
    "fsdp2/param_group.py": {"_by_address"},  # compiled code sees tensors under other identities
    "fsdp2/take_over.py": {"_backends", "_models", "_watched"},  # Dynamo watches compiles of the process
    "ops/comm_hook.py": {"_registered"},  # graphs name hooks
    "ops/host_copy.py": {"_running"},  # graphs see tensors, which have no room for an event
}
"""Names, of modules or classes, that are bound to something that changes."""
MAKERS = re.compile(r"dict|list|set|deque|defaultdict|count|local|_?[A-Z]\w*")
"""Functions and classes that make something that changes, for all that their names tell."""
TRICKS = {
    r"__class__ = ": {"__init__.py", "_torch/fully_shard.py", "_torch/fully_shard_calls.py", "fsdp2/stale.py"},
    r"(?<![\w.])gc\.": {"pipeline.py", "comm/failures.py", "fsdp2/stale.py"},
    r"_getframe": {"_torch/dynamo.py"},
    r"(?<![\w.])eval\(": {"_torch/dynamo.py"},
    r"\.f_locals": {"_torch/dynamo.py"},
    r"getrefcount": set(),
    r"\.prepend\(": {"ir/edit.py"},  # what it moves stays behind what it needs
}
"""Patterns of code, and the files that may have it: each says there why."""
SHORTEST, LONGEST = 15, 500
PRIVATE_WORDS = (
    "given again",
    "hand over",
    "handed over",
    "hands over",
    "looked at",
    "nobody",
    "settled",
    "unsettled",
    "whoever",
)
"""Words of this package's own for what the field has terms for."""

FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
CODE = [name for name in FILES if Path(name).name not in ("__init__.py", "__main__.py")]


def _module(file: str) -> str:
    return ".".join(("fsdp_compile", *Path(file).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {_module(file): file for file in FILES}


@functools.cache
def _tree(file: str) -> ast.Module:
    return ast.parse(FILES[file].read_text())


@functools.cache
def _imports(module: str, *, for_types: bool = True) -> frozenset[str]:
    """Modules of the package that one imports: at its top, in its functions, or for its types alone."""
    found = set()
    tree = _tree(MODULES[module])
    typed = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typed and not for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & MODULES.keys() or {node.module}
    return frozenset(found - {module})


def _part(module: str) -> str:
    """The folder, or the file, directly below the package that a module is in."""
    return f"{module}.__init__".split(".")[1]


def _floor(module: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if _part(module) in floor)


def test_imports_go_down() -> None:
    seen = [(module, other) for module in MODULES for other in _imports(module) if _part(other) != _part(module)]
    assert [f"{module}: {other}" for module, other in seen if _floor(other) >= _floor(module)] == []


@pytest.mark.parametrize(("wing", "other"), [(GRAPHS, TRAINING), (TRAINING, GRAPHS)], ids=["graphs", "training"])
def test_the_wings_do_not_see_each_other(wing: set[str], other: set[str]) -> None:
    mine = [module for module in MODULES if _part(module) in wing]
    assert [f"{m}: {seen}" for m in mine for seen in _imports(m) if _part(seen) in other] == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    left = {module: set(_imports(module, for_types=False)) for module in MODULES}
    while True:
        needed = {other for module in left for other in left[module]}
        free = [module for module in left if module not in needed or not left[module] & left.keys()]
        if not free:
            break
        for module in free:
            del left[module]
    assert sorted(left) == []


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    """Names that statements bind, with their values; those of the classes among them too."""
    for statement in body:
        if isinstance(statement, ast.ClassDef) and not _is_dataclass(statement):
            yield from _bound(statement.body)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from ((target.id, statement.value) for target in targets if isinstance(target, ast.Name))


def _is_dataclass(statement: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in statement.decorator_list)


def _changes(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return MAKERS.fullmatch(ast.unparse(value.func).split(".")[-1]) is not None
    return isinstance(value, ast.Dict | ast.List | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _changing(file: str) -> set[str]:
    bound = {name for name, value in _bound(_tree(file).body) if _changes(value)}
    return {name for name in bound if name.islower() and not name.startswith("__")}  # others are constants, or types


def test_what_a_process_shares_is_listed() -> None:
    assert {file: found for file in FILES if (found := _changing(file))} == SHARED_BY_A_PROCESS


def test_nothing_is_made_global_by_a_statement() -> None:
    assert [file for file in FILES for node in ast.walk(_tree(file)) if isinstance(node, ast.Global)] == []


@functools.cache
def _code(file: str) -> str:
    """The text of a file without comments and strings."""
    tokens = tokenize.generate_tokens(StringIO(FILES[file].read_text()).readline)
    lines: dict[int, str] = {}
    for token in tokens:
        if token.type not in (tokenize.COMMENT, tokenize.STRING):
            before = lines.get(token.start[0], "")
            lines[token.start[0]] = before.ljust(token.start[1]) + token.string
    return "\n".join(lines.values())


@pytest.mark.parametrize("trick", TRICKS)
def test_tricks_stand_where_they_are_explained(trick: str) -> None:
    assert {file for file in FILES if re.search(trick, _code(file))} == TRICKS[trick]


def _of_torch(file: str) -> set[str]:
    """Names in a file that are torch, or something imported from it."""
    found = set()
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def _assigned(file: str) -> Iterator[str]:
    """Attributes that statements of a file assign to, as they are written."""
    for node in ast.walk(_tree(file)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (ast.unparse(target) for target in targets if isinstance(target, ast.Attribute))


def test_nothing_of_torch_is_replaced_outside_of_its_folder() -> None:
    files = [file for file in FILES if not file.startswith("_torch/")]
    found = [f"{file}: {one}" for file in files for one in _assigned(file) if one.split(".")[0] in _of_torch(file)]
    assert found == []


def test_only_stale_parameters_play_parameters() -> None:
    classes = [(file, node) for file in FILES for node in ast.walk(_tree(file)) if isinstance(node, ast.ClassDef)]
    bases = {file for file, node in classes for base in node.bases if ast.unparse(base).endswith("nn.Parameter")}
    assert bases == {"fsdp2/stale.py"}


OF_UNITS = "fsdp2/unit.py"
CHANGING = {"append", "add", "discard", "remove", "clear", "update", "pop", "setdefault", "extend"}
"""Methods that change what they are called on."""


def _changed(tree: ast.AST) -> Iterator[str]:
    """Attributes that code assigns to, fills or empties, as they are written."""
    for node in ast.walk(tree):
        targets = [*node.targets] if isinstance(node, ast.Assign | ast.Delete) else [getattr(node, "target", None)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            targets = [node.func.value]
        for target in targets:
            changed = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(changed, ast.Attribute):
                yield ast.unparse(changed)


def test_the_state_of_a_unit_is_changed_in_the_files_that_its_docstring_names() -> None:
    unit = next(n for n in ast.walk(_tree(OF_UNITS)) if isinstance(n, ast.ClassDef) and n.name == "Unit")
    state = {one.replace("self.", "unit.") for one in _changed(unit)} | {"unit.pre_hook", "unit.post_hook"}
    changing = {file for file in FILES if file != OF_UNITS and not state.isdisjoint(_changed(_tree(file)))}
    assert changing == set(re.findall(r"`([\w/]+\.py)`", ast.get_docstring(unit) or ""))


@pytest.mark.skipif(not (PACKAGE.parent / ".git").exists(), reason="not a clone")
def test_the_top_level_has_what_belongs_there_and_no_more() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    names = {Path(file).parts[0] for file in listed.stdout.splitlines()}
    named = {name for name in names if not name.startswith(".")}
    assert named == {"pyproject.toml", "fsdp_compile", "tests", "benchmarks", "docs", "README.md"}


def test_a_file_is_one_concept() -> None:
    lines = {file: len(FILES[file].read_text().splitlines()) for file in CODE}
    assert {file: count for file, count in lines.items() if not SHORTEST <= count <= LONGEST} == {}


@pytest.mark.parametrize("file", [file for file in FILES if Path(file).parts[0] in TRAINING])
def test_training_is_described_in_words_of_the_field(file: str) -> None:
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(_tree(file)) if isinstance(node, described)]
    text = " ".join(" ".join((ast.get_docstring(node) or "").lower().split()) for node in nodes)
    assert [words for words in PRIVATE_WORDS if re.search(rf"\b{words}\b", text)] == []


_EACH_ALONE = """
import importlib, os, sys, types
import rich.console, sympy, torch, torch._dynamo, torch._inductor.compile_fx
import torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor
package = types.ModuleType("fsdp_compile")
package.__path__ = [sys.argv[1]]
sys.modules["fsdp_compile"] = package  # so that its __init__ does not import everything first
for module in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(module)
        except BaseException as error:
            print(f"{module}: {type(error).__name__}: {error}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="each import needs a process of its own")
def test_a_module_that_uses_our_operators_can_be_imported_first() -> None:
    """It registers them by what it imports; without circles, a module that uses imported names alone cannot fail."""
    modules = [_module(file) for file in FILES if "ops.fsdp" in _code(file)]
    assert modules
    command = [sys.executable, "-c", _EACH_ALONE, str(PACKAGE), *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
