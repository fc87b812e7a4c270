"""Private names of Inductor's lowerings: how it writes the call of an operator."""

from __future__ import annotations

from typing import Any, Final

from torch._inductor import config
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.virtualized import V

_CHECK = "combo_kernel_peak_memory_pct_threshold"
COMBO_KERNELS_UNCHECKED: Final[dict[str, None]] = {_CHECK: None} if hasattr(config, _CHECK) else {}
"""Joins kernels, if that is asked for, without a look at memory, after which torch 2.13 fails."""


def compute_readers_first(operator: Any) -> None:
    """Makes Inductor compute what reads an operator's first argument before the operator, which writes it.

    Inductor computes a pointwise result where it is used. Before memory is written it computes the results that were
    read from it so far; but for an operator that it only calls, it does so when the call has its place already. Then
    these read what was written.
    """
    if operator in lowerings:
        return
    call = fallback_handler(operator)

    def lower(written: Any, *others: Any) -> Any:
        written.realize()
        V.graph.mark_buffer_mutated(written.get_name())
        return call(written, *others)

    register_lowering(operator, type_promotion_kind=None)(lower)
