"""The folder in which Inductor keeps what it compiles, and whether it looks there first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def cache_folder() -> Path:
    """Where Inductor keeps generated code, libraries and compiled graphs; it need not exist yet."""
    return Path(os.environ.get(_VARIABLE) or default_cache_dir())


def looks_into_cache(settings: Mapping[str, Any]) -> bool:
    """Whether Inductor loads graphs that this or another process has compiled.

    Args:
        settings: Of one compile; what it leaves out is as in Inductor's settings at this moment.
    """
    names = ("fx_graph_cache", "force_disable_caches")
    looks, is_disabled = (settings.get(name, getattr(config, name)) for name in names)
    return bool(looks and not is_disabled)


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
