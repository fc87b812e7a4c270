"""Private names of torch's context parallelism: what it reads while attention is traced, and nothing guards on."""

from __future__ import annotations

import sys
from typing import Any

from torch.distributed.tensor import DTensor

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"


def balances_tokens() -> bool:
    """Whether attention takes the tokens of a rank for those that a load balancer has put there."""
    return bool(_attention()._cp_options.enable_load_balance)


def balance_in_trace() -> bool | None:
    """The same while a graph is compiled; `None` if attention is that of one process."""
    if _attention() is None or DTensor._op_dispatcher._custom_op_handlers is _attention().existing_custom_ops:
        return None
    return balances_tokens()


def _attention() -> Any:
    return sys.modules.get(_MODULE)  # not imported: what has not been imported is not in use
