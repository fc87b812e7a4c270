"""What of `memory_budget_gb` is for graphs: nearly all of it.

The rest is for what a step holds beside its graphs: the loss and its gradient, seeds, buffers that nothing reads.
"""

from __future__ import annotations

import math
from typing import Final

_BESIDE: Final = 4096
"""One byte in so many is left for what no graph knows of."""


def of_graphs(budget_bytes: int) -> int:
    """What a graph may hold under a budget, in bytes."""
    return budget_bytes - budget_bytes // _BESIDE


def for_graphs(held_bytes: int) -> int:
    """A budget under which a graph may hold so many bytes: `of_graphs(for_graphs(n)) >= n`."""
    return held_bytes + math.ceil(held_bytes / (_BESIDE - 1))
