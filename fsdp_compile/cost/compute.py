"""Time of each computing node: a roofline over its FLOPs and the bytes that its kernel reads and writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fsdp_compile.cost.communicate import is_own
from fsdp_compile.cost.fusion import Kernels, launches_nothing, shares_memory
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.sizes import concrete, result_bytes, tensor_bytes, tensors_of


def value_of(argument: Any) -> Any:
    """The fake value of an argument that is a node."""
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class NodeCost:
    """What one node costs; a multiply and an add are two FLOPs.

    `time_us` is the device's own estimate, or the roofline of the two others.
    """

    flops: int
    size_bytes: int
    time_us: float


FREE = NodeCost(0, 0, 0.0)


def node_costs(
    graph: fx.Graph, hardware: Hardware, kernels: Kernels, *, wanted: Collection[fx.Node] | None = None
) -> dict[fx.Node, NodeCost]:
    """Costs of all nodes; memory that a kernel reads twice is counted at the first node that reads it.

    If only some are `wanted`, others may be missing.
    """
    device = hardware.device
    costs = dict.fromkeys(graph.nodes if wanted is None else wanted, FREE)
    asked = None if wanted is None else {kernels.of[node] for node in wanted if node in kernels.of}
    read: dict[int, set[fx.Node]] = {}
    maker: dict[fx.Node, fx.Node] = {}  # of the memory that a node's result lies in
    for node in graph.nodes:
        inputs = node.all_input_nodes
        maker[node] = maker[inputs[0]] if inputs and shares_memory(node) else node
        if launches_nothing(node) or (asked is not None and kernels.of[node] not in asked):
            continue
        seen = read.setdefault(kernels.of[node], set())
        views: dict[fx.Node, list[fx.Node]] = {}
        for view in inputs:
            views.setdefault(maker[view], []).append(view)
        sources = views.keys() - kernels.inner - seen
        seen |= sources
        size_bytes = sum(_read_bytes(node, views[source]) for source in sources)
        size_bytes += 0 if node in kernels.inner else result_bytes(node)
        flops = _flops(node)
        time_us = 0.0 if is_own(node) else device.estimate and device.estimate(node)  # it takes time on its link
        if time_us is None:
            computing_us = flops * 1e6 / device.flops_per_s(multiplied_dtype(node))
            time_us = max(computing_us, size_bytes * 1e6 / device.bytes_per_s)
        costs[node] = NodeCost(flops, size_bytes, time_us)
    return costs


def _flops(node: fx.Node) -> int:
    """FLOPs by torch's own formulas; 0 for operators without one, which are bound by memory."""
    packet = getattr(node.target, "overloadpacket", node.target)
    if packet in _ATTENTION:
        formula, factors, position = _ATTENTION[packet]
        flops = formula(*(tuple(map(concrete, value_of(arg).shape)) for arg in node.args[:factors]))
        causal = node.args[position] if len(node.args) > position else node.kwargs.get("is_causal", False)
        return flops // 2 if causal is True else flops  # the kernel skips what the mask hides
    counted = flop_registry.get(packet)
    if counted is None:
        return 0
    args, kwargs = tree_map(value_of, (node.args, node.kwargs))
    return concrete(counted(*args, **kwargs, out_val=value_of(node)))


# Attention as traced on the CPU, also for devices with flash kernels; torch has no formula for it.
_ATTENTION: dict[Any, tuple[Callable[..., int], int, int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (sdpa_flop_count, 3, 4),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (sdpa_backward_flop_count, 4, 7),
}
"""A formula, of how many of the first arguments, and the position of `is_causal`."""


def _read_bytes(reader: fx.Node, views: Sequence[fx.Node]) -> int:
    """Bytes that a reader takes from one memory through `views`."""
    size = max((tensor_bytes(tensor) for view in views for tensor in tensors_of(view)), default=0)
    # A lookup reads only the rows that it returns.
    if getattr(reader.target, "overloadpacket", None) in (aten.embedding, aten.index, aten.gather):
        return min(size, result_bytes(reader))
    return size


def multiplied_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype in which a matmul multiplies: the narrowest of its inputs.

    A bias, scales of 8-bit factors, and the logarithms that attention saves are wider, and are not multiplied.
    """
    floating = [t.dtype for n in node.all_input_nodes for t in tensors_of(n) if t.is_floating_point()]
    return min(floating, key=lambda dtype: dtype.itemsize, default=None)
