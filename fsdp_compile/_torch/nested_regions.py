"""What torch does at each call of a nested region (`torch.compiler.nested_compile_region`) in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CHECKED = "_supports_training_input_mutation"
"""Attribute of operators with functions: whether autograd need not trace them to find out if they write into inputs."""


@contextmanager
def known_not_to_write() -> Iterator[None]:
    """Tells autograd that the nested regions it traces in the block write into none of their inputs.

    To find that out, torch 2.13 traces a region at each call of it, which is 0.14 s for each layer of a Llama.
    `capture/nested_regions.py` has looked.
    """
    operator: Any = torch.ops.higher_order.invoke_subgraph
    before = getattr(operator, _CHECKED, None)
    if before is None:
        yield
        return
    setattr(operator, _CHECKED, True)
    try:
        yield
    finally:
        setattr(operator, _CHECKED, before)
