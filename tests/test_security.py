"""What the package reads that others may have written is never executed: docs/faults.md."""

from __future__ import annotations

import ast
import contextlib
import ipaddress
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import fully_shard
from fsdp_compile.comm.failures import _FAILED, AnsweringStore, failed_elsewhere
from fsdp_compile.comm.rendezvous import Rendezvous
from fsdp_compile.errors import FSDPCompileError, RankFailedError
from tests.ranks import on_ranks
from tests.two_sides import mesh_of

PACKAGE = Path(__file__).parents[1] / "fsdp_compile"
EXECUTES = {
    "parity/processes.py": {"pickle.loads"},  # from the pipes of processes that it starts
    "state/optim_state.py": {"pickle.loads"},  # from the first rank
    "_torch/dynamo.py": {"eval"},  # expressions of Dynamo's guards
}
"""What may execute what it reads, by file."""
_CALLS = {
    *("eval", "exec", "compile", "pickle.loads", "pickle.load", "pickle.Unpickler", "marshal.loads", "shelve.open"),
    *("FileSystemReader", "dcp.FileSystemReader", "dcp.load_state_dict", "dcp_to_torch_save"),  # which unpickle
}


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
            if name == "dcp.load":
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                # By themselves torch's reader and planner unpickle `.metadata` and values.
                assert given.get("planner") == "SafePlanner()", f"{path}:{call.lineno}"
                assert given.get("storage_reader") in {"SafeReader(folder)", "reader"}, f"{path}:{call.lineno}"
            if name == "load_state_dict":  # what torch's converters call
                assert ast.unparse(call) == "load_state_dict(state, self.reader, planner=planner, no_dist=True)"
                assert "reader: SafeReader | None" in path.read_text()
                assert "planner = SafePlanner(" in path.read_text()
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


_LISTENS = "0A"
"""The state of a socket in the kernel's tables."""


def _listening() -> set[str]:
    """The addresses on which this process listens."""
    found = set()
    sockets = _sockets()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, of_socket = line.split()[:10]
            if state == _LISTENS and of_socket in sockets:
                found.add(_address(local.partition(":")[0]))
    return found


def _sockets() -> set[str]:
    """The numbers of this process's sockets."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one of the listing itself
            found.add(str(file.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found


def _address(digits: str) -> str:
    """The kernel writes words of 32 bits in the order of the machine."""
    words = [bytes.fromhex(digits[i : i + 8]) for i in range(0, len(digits), 8)]
    ordered = [word[::-1] for word in words] if sys.byteorder == "little" else words
    return str(ipaddress.ip_address(b"".join(ordered)))


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc; tests listen on lo there")
@on_ranks(world_size=4)
def test_ranks_listen_on_the_interface_that_was_asked_for_alone() -> None:
    """Before and after a model was sharded that uses every kind of group."""
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    mesh = mesh_of((2, 2))
    assert _listening() == {"127.0.0.1"}
    model = fully_shard(nn.Linear(8, 8), mesh=mesh, separate_reduce_group=True)
    model(torch.ones(2, 8)).sum().backward()
    assert _listening() == {"127.0.0.1"}
