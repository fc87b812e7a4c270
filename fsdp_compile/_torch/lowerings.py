"""Private names of Inductor's lowerings: how it writes the call of an operator."""

from __future__ import annotations

from typing import Any

from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.virtualized import V


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
