"""Two passes over Inductor's kernels that keep them in the order of the graph.

Inductor fuses kernels that read the same memory, however far apart they are, and puts the result where the first one
was. All that the last one needs is then done before that: waits, and the matmuls after them.

    planned    %a, start of a reduction, wait, mm, %b          %a and %b read the same
    without    wait, mm, [%a %b], start of a reduction         it starts late
    with       %a, start of a reduction, wait, mm, %b          not fused, if the reduction sends %a
               start of a reduction, wait, mm, [%a %b]         else

Before fusion, each call of an operator (collectives and their waits, matmuls, attention) is made to depend on the one
before it: Inductor then refuses what would move one across another. A call also depends on reductions before it that
read what is freed there, as those for gradients of norms do. After it, each kernel is put right before its first
reader, or where its last part was if that is earlier.
"""

from __future__ import annotations

from typing import Any

from fsdp_compile._torch import inductor


class _SchedulerPass(inductor.CustomSchedulerPass):
    """A pass in the form that Inductor's settings, and its cache, accept."""

    VERSION = 3
    """To be counted up when a pass, a mark on nodes or `_torch/inductor.py` changes: the cache looks at this alone."""

    def uuid(self) -> str:
        return f"fsdp_compile.{type(self).__name__}.{self.VERSION}"

    def __repr__(self) -> str:
        return self.uuid()  # the same in all processes, for what compares settings as text

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        # Some settings are pickled into the cache's key.
        return str, (self.uuid(),)


class FixCalls(_SchedulerPass):
    """Before fusion: lets calls of operators depend on each other in their order."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Returns the nodes as they are, with more dependencies."""
        if nodes:
            inductor.run_in_order([node for node in nodes if inductor.calls_operator(node)])
            inductor.reduce_in_place(nodes)
            inductor.note_dependencies(nodes)
        return nodes


class PlaceLate(_SchedulerPass):
    """After fusion: puts each kernel where its last part was, or right before its first reader."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Returns the nodes in their new order."""
        sources = inductor.sources_of(nodes)
        place = {node: node.max_order for node in nodes}
        for node in reversed(nodes):
            for source in sources[node]:
                place[source] = min(place[source], place[node])
        # No node is behind one that reads it, and among equals the order stays, in which none is either.
        return sorted(nodes, key=place.__getitem__)


KEEP_CALLS_IN_ORDER = {"_pre_fusion_custom_pass": FixCalls(), "_post_fusion_custom_pass": PlaceLate()}
"""Settings of Inductor."""
