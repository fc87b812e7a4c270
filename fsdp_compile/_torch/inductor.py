"""Private names of Inductor: its lowerings and scheduler, and the folder in which it keeps what it compiles."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch._inductor import config
from torch._inductor.dependencies import WeakDep
from torch._inductor.ir import MultiOutput
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

try:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
except ImportError:  # an older torch has no such class, and caches nothing that a pass of the scheduler has changed
    CustomSchedulerPass = object  # type: ignore[assignment, misc]


_CHECK = "combo_kernel_peak_memory_pct_threshold"
COMBO_KERNELS_UNCHECKED: Final[dict[str, None]] = {_CHECK: None} if hasattr(config, _CHECK) else {}
"""Joins kernels, if that is asked for, without a look at memory, after which torch 2.13 fails."""
COMMUNICATION_KEPT: Final[dict[str, bool]] = {
    f"aten_distributed_optimizations.{name}": False
    for name in ("enable_simple_overlap", "enable_overlap_scheduling")
    if hasattr(config.aten_distributed_optimizations, name)
}
"""Turns off what would move collectives and their waits; the first is on by default since torch 2.14."""
_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


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


def calls_operator(node: Any) -> bool:
    """Whether a node of the scheduler calls an operator, and is not a kernel of Inductor's or an item of a list."""
    return isinstance(node, ExternKernelSchedulerNode) and not isinstance(node.node, MultiOutput)


def run_in_order(calls: Sequence[Any]) -> None:
    """Makes each node depend on the one before it, for its place alone: no memory is held longer for it."""
    named = [(node, next(iter(node.get_buffer_names()))) for node in calls if node.get_buffer_names()]
    for (_, made), (after, waiting) in itertools.pairwise(named):
        after.add_fake_dep(WeakDep(made, mutating_buf=waiting, is_fake=True))


def reduce_in_place(nodes: Sequence[Any]) -> None:
    """Makes the call behind a reduction depend on it, where nothing behind the call reads what the reduction reads.

    Put later, with another reduction, it would hold what it reads: values as large as activations for a few numbers.
    """
    calls = [node for node in nodes if calls_operator(node)]
    behind = list(itertools.accumulate(map(calls_operator, nodes[:-1]), initial=0))  # calls before each node
    last = {read.name: number for node, number in zip(nodes, behind, strict=True) for read in node.read_writes.reads}
    for node, number in zip(nodes, behind, strict=True):
        if number < len(calls) and node.is_reduction() and number in [last[r.name] for r in node.read_writes.reads]:
            run_in_order([node, calls[number]])


def note_dependencies(nodes: Sequence[Any]) -> None:
    """Notes again what each of all nodes depends on, directly or not, after some have got a dependency.

    The scheduler's own method does so before it joins nodes of `torch._foreach_*`, and fails afterwards.
    """
    for node, sources in sources_of(nodes).items():  # each after its sources
        ancestors: OrderedSet[str] = OrderedSet()
        for source in sources:
            ancestors |= source.get_operation_names()
            ancestors |= source.ancestors
        node.ancestors = ancestors


def sources_of(nodes: Sequence[Any]) -> dict[Any, list[Any]]:
    """For each node of the scheduler, those that have to come before it."""
    makers = {name: node for node in nodes for name in node.get_buffer_names()}
    found = {node: [makers.get(dependency.name) for dependency in node.unmet_dependencies] for node in nodes}
    return {node: [each for each in sources if each not in (None, node)] for node, sources in found.items()}


def cache_folder() -> Path:
    """Where Inductor keeps generated code, libraries and compiled graphs; it need not exist yet."""
    return Path(os.environ.get(_VARIABLE) or default_cache_dir())


def looks_into_cache(settings: Mapping[str, Any]) -> bool:
    """Whether Inductor loads graphs that this or another process has compiled, with these settings in place of its."""
    names = ("fx_graph_cache", "force_disable_caches")
    looks, is_disabled = (settings.get(name, getattr(config, name)) for name in names)
    return bool(looks and not is_disabled)


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
