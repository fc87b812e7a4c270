"""The folder in which Inductor keeps what it compiles, and whether it looks there first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def cache_folder() -> Path:
    """Where Inductor keeps generated code, libraries and compiled graphs; it need not exist yet."""
    return Path(os.environ.get(_VARIABLE) or default_cache_dir())


def looks_into_cache() -> bool:
    """Whether Inductor, by its settings at this moment, loads graphs that this or another process has compiled."""
    return bool(config.fx_graph_cache and not config.force_disable_caches)


def compiled_graphs() -> int:
    """How many graphs this process has compiled so far, rather than loaded."""
    counted = counters["inductor"]
    return int(counted["fxgraph_cache_miss"] + counted["fxgraph_cache_bypass"])


@contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """Makes Inductor use another folder within the block."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
