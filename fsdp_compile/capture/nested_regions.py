"""Finds the nested regions (`torch.compiler.nested_compile_region`) that AOTAutograd traces once.

Their calls stay in Dynamo's graph, and are inlined into forward and backward (`partition/nested_regions.py`), which are
as if there were no regions. It takes a fraction of the time: as Dynamo does, autograd and the partitioner see a region
once. All others are inlined before autograd traces them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_compile._torch.tensors import HigherOrderOperator
from fsdp_compile.capture.functions import reads_in
from fsdp_compile.capture.written import written_nodes
from fsdp_compile.ir.functions import operands_of, region_calls, region_of
from fsdp_compile.layout.spec import parse


def traced_once(graph: fx.Graph) -> frozenset[fx.Node]:
    """The calls in a Dynamo graph of such regions: each is called more than once, and reads and computes alone."""
    calls = list(region_calls(graph))
    times = Counter(map(region_of, calls))
    only_computes = {region: _only_computes(region) for region in times}
    return frozenset(
        call for call in calls if times[region_of(call)] > 1 and only_computes[region_of(call)] and _is_alone(call)
    )


def _only_computes(region: fx.GraphModule) -> bool:
    """Whether a region has no functions of its own, writes nothing, and gives no parameter as it is."""
    reads = reads_in(region)
    places = {(node.args[0], parse(str(node.args[1])).offset) for node in reads}
    (returned,) = region.graph.output_node().args
    assert isinstance(returned, tuple | list)
    return (
        not any(isinstance(node.target, HigherOrderOperator) or any(written_nodes(node)) for node in region.graph.nodes)
        # DTensors: autograd traces a region with what they are made of.
        and not any(is_traceable_wrapper_subclass(_example(node)) for node in region.graph.nodes)
        # Eager code that gets a parameter from a graph is to find that it is one.
        and not any(result in reads for result in returned)
        # Reads of one parameter would be made alike, and have to be for all calls.
        and len({node.args[:2] for node in reads}) == len(places)
        # A post-forward shard has the name of its parameter, which is another one in each call.
        and all(parse(str(node.args[1])).post_forward_size == 1 for node in reads)
    )


def _is_alone(call: fx.Node) -> bool:
    """Whether a region is called with tensors, and nothing else reads the flat parameters that it reads."""
    tensors = all(isinstance(_example(operand), torch.Tensor) for operand in operands_of(call))
    return tensors and all(len(flat.users) == 1 for flat in _flats(call))


def _flats(call: fx.Node) -> Iterator[fx.Node]:
    region = region_of(call)
    read = {node.args[0] for node in reads_in(region)}
    for argument, operand in zip(region.graph.find_nodes(op="placeholder"), operands_of(call), strict=True):
        if argument in read:
            yield operand


def _example(operand: Any) -> Any:
    return operand.meta.get("example_value") if isinstance(operand, fx.Node) else operand
