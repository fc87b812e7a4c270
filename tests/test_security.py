"""What the package reads that others may have written is never executed: docs/security.md."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_compile.comm.answering_store import AnsweringStore
from fsdp_compile.comm.failures import _FAILED, failed_elsewhere
from fsdp_compile.comm.rendezvous import Rendezvous
from fsdp_compile.errors import FSDPCompileError, RankFailedError

PACKAGE = Path(__file__).parents[1] / "fsdp_compile"
EXECUTES = {
    "parity/processes.py": {"pickle.loads"},  # from the pipes of processes that it starts
    "state/optim_to_load.py": {"pickle.loads"},  # from the first rank
    "_torch/dynamo.py": {"eval"},  # expressions of Dynamo's guards
}
"""What may execute what it reads, by file."""
_CALLS = {"eval", "exec", "compile", "pickle.loads", "pickle.load", "pickle.Unpickler", "marshal.loads", "shelve.open"}


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def test_nothing_executes_what_it_reads_but_where_that_is_our_own() -> None:
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for call in _calls(ast.parse(path.read_text())):
            name = ast.unparse(call.func)
            if name in _CALLS:
                found.setdefault(path.relative_to(PACKAGE).as_posix(), set()).add(name)
            if name == "torch.load":
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                assert given.get("weights_only") == "True", f"{path}:{call.lineno}"
    assert found == EXECUTES


class _Trap:
    """Pickled, it writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (_touch, (str(self.path),))


def _touch(path: str) -> None:
    Path(path).touch()


@pytest.fixture
def store(tmp_path: Path) -> dist.Store:
    """A store that a stranger can write to."""
    return dist.FileStore(str(tmp_path / "store"), 1)


def test_what_a_stranger_writes_into_the_store_is_shown_and_not_executed(store: dist.Store, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    hostile = pickle.dumps(_Trap(trap), protocol=0).decode()
    store.set(_FAILED, hostile)
    told = failed_elsewhere(store, "waiting")
    assert isinstance(told, RankFailedError)
    assert "_touch" in told.what
    meeting = Rendezvous(AnsweringStore(dist.PrefixStore("group", store), 10), "group", (0, 1), 0, 0.1)
    for key in ("failed", "0/refused"):
        meeting.store.set(key, hostile)
        with pytest.raises((FSDPCompileError, ValueError)):
            meeting.meet(0)
        meeting.store.delete_key(key)
    assert not trap.exists()
    pickle.loads(pickle.dumps(_Trap(trap)))
    assert trap.exists(), "the trap works"
