"""The only module of the benchmarks that imports private names of torch. Checked on torch 2.11, 2.13 and 2.15."""

from __future__ import annotations

import functools
import gc
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache

from fsdp_compile._torch.distributed import fake_store

__all__ = [
    "cache_folder",
    "compiled_graphs",
    "fake_store",
    "forget_meshes",
    "fresh_cache",
    "inductor_config",
]


def compiled_graphs() -> int:
    """How many graphs this process has compiled so far, rather than loaded."""
    counted = counters["inductor"]
    return int(counted["fxgraph_cache_miss"] + counted["fxgraph_cache_bypass"])


def cache_folder() -> Path:
    """Where Inductor keeps what it has compiled, and the locks of that."""
    return Path(cache_dir())


def forget_meshes() -> None:
    """Clears DTensor's caches: they hold meshes, which hold groups, whose threads wake a hundred times a second."""
    from torch.distributed.tensor import DTensor, _redistribute

    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor."):
            _clear_caches(module)
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    for module, clear in (
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
        (_redistribute, "clear_redistribute_planner_cache"),
    ):
        getattr(module, clear, lambda: None)()  # not in every version
    gc.collect()  # meshes refer to themselves


def _clear_caches(namespace: Any) -> None:
    """Clears `functools.cache`s of the functions of a module, and of the methods of its classes."""
    for value in list(vars(namespace).values()):
        function = getattr(value, "__func__", value)
        if isinstance(function, functools._lru_cache_wrapper):
            function.cache_clear()
        elif isinstance(value, type) and isinstance(namespace, ModuleType) and value.__module__ == namespace.__name__:
            _clear_caches(value)
