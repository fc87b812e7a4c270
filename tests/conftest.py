"""What all tests share: one Inductor cache, one thread, a clean torch for each test, fake worlds."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    import torch.distributed as dist

# Read when torch is imported, here and in the ranks, so set before anything below imports it.
# The folder outlives the session, so the second run is fast; two torch versions do not share one.
_CACHE = f"fsdp_compile-inductor-{os.getuid()}-torch{importlib.metadata.version('torch')}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / _CACHE))
# One thread everywhere: ranks share few cores, and generated kernels contain the number of threads.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if sys.platform == "linux":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve

# The same examples in every run, and no verdict by the clock of a busy machine.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden/ as the passes are now; read the diff before you commit it",
    )
    parser.addoption(
        "--update-parity-results",
        action="store_true",
        help="write docs/parity.md with what the comparisons of this run found",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves the long tests to CI, or all but a share of them: what they cover in full, others cover in part."""
    setting = os.environ.get("FSDP_COMPILE_LONG", "")
    skip = pytest.mark.skip(reason="FSDP_COMPILE_LONG=1 runs it")
    for item in items:
        if item.get_closest_marker("long") and is_left_out(item.nodeid, setting):
            item.add_marker(skip)


def is_left_out(test: str, setting: str) -> bool:
    """Whether a long test is left out: all for "" and "0", all but the second eighth for "2/8", none for "1"."""
    number, slash, shares = setting.partition("/")
    if not slash:
        return setting in ("", "0")
    return zlib.crc32(test.encode()) % int(shares) + 1 != int(number)


@pytest.hookimpl(optionalhook=True)  # `-p no:xdist` runs without it
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests with ranks go to one process in two, but for a quarter; that and others, by folder, to those that are free.

    Ranks compile at the same time, one on each core, and a pool of them takes seconds to start: two pools are slower
    than one, but not than a core that has nothing to do. Tests with ranks take two thirds of the time. Tests of one
    folder use the same graphs and plans, which a process makes once.
    """
    from xdist.scheduler import LoadScopeScheduling

    pools = max(1, (config.getoption("numprocesses") or 1) // 2)

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, _ = nodeid.partition("::")
            if _needs_ranks(config.rootpath / file):
                share = zlib.crc32(file.encode())
                return "ranks, the rest" if share % 4 == 3 else f"ranks {share % pools}"
            return file.rpartition("/")[0]

    return Together(config, log)


@functools.cache
def _needs_ranks(file: Path) -> bool:
    return "from tests.ranks import" in file.read_text(encoding="utf-8")


def pytest_collection_finish() -> None:
    """What was imported for all tests stays, and need not be looked through in each."""
    from tests.rank_worker import set_aside

    set_aside()


@pytest.fixture(autouse=True)
def _clean_torch() -> Iterator[None]:
    """Every test finds torch as a new process would have it, and leaves no process group behind."""
    import torch.distributed as dist

    from tests.rank_worker import reset_torch, set_aside

    reset_torch()
    set_aside()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def fake_world() -> Callable[..., AbstractContextManager[dist.ProcessGroup]]:
    """`with fake_world(8): ...` runs in a default group of 8 ranks, 7 of which do not exist."""
    from tests import fake_world as module

    return module.fake_world


@pytest.fixture
def world() -> Iterator[None]:
    """A default group of 4 ranks, 3 of which do not exist."""
    from tests import fake_world as module

    with module.fake_world(4):
        yield


def pytest_unconfigure() -> None:
    """End the ranks with the session, also one that was interrupted."""
    if "tests.ranks" in sys.modules:
        sys.modules["tests.ranks"].close_pool()
