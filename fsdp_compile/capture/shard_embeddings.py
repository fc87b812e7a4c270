"""Looks embeddings up on the ranks that have their rows, instead of gathering tables (`embedding="sharded"`).

    %w = fsdp_compile.unshard(%flat, spec); %y = F.embedding(%ids, %w) -> %y = fsdp_compile.look_up(%flat, %ids, spec)

This is done in Dynamo's graph, where the call is still the user's, before autograd traces it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.nn import functional

from fsdp_compile.capture.functions import READS
from fsdp_compile.errors import ConfigError
from fsdp_compile.ir.queries import module_of
from fsdp_compile.ir.source_line import source_line
from fsdp_compile.layout.spec import GradPlacement, UnshardSpec, parse
from fsdp_compile.ops.embedding import LOOK_UP

_ARGUMENTS = inspect.signature(functional.embedding)


def shard_lookups(gm: fx.GraphModule) -> None:
    """Rewrites every lookup in a parameter that is sharded by rows; raises `ConfigError` where that cannot be."""
    for node in gm.graph.find_nodes(op="call_function", target=functional.embedding):
        bound = _ARGUMENTS.bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        given = bound.arguments
        weight = given["weight"]
        if not isinstance(weight, fx.Node) or weight.target not in READS:
            continue
        flat, text, *beside = weight.args
        spec = parse(str(text))
        # Accumulated gradients (`no_sync`) are those of full parameters, and parameters that are still unsharded need
        # no exchange: such tables are read as always.
        is_accumulating = spec.grad_placement is not GradPlacement.REDUCED or any(held is not None for held in beside)
        if spec.size == 1 or is_accumulating:
            continue
        for problem, instead in _problems(weight, spec, given):
            raise ConfigError(
                f"an embedding cannot stay sharded: {problem}",
                where=f"options={{'embedding': 'sharded'}}, {module_of(node) or node.name}, {source_line(node)}",
                instead=instead,
            )
        with gm.graph.inserting_before(node):
            # The row without gradients, as a row number; -1 for none.
            padding = -1 if given["padding_idx"] is None else given["padding_idx"] % spec.shape[0]
            scale = bool(given["scale_grad_by_freq"])
            made = gm.graph.call_function(LOOK_UP, (flat, given["input"], text, padding, scale))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        for unused in (node, weight):
            if not unused.users:
                gm.graph.erase_node(unused)
    gm.recompile()


def _problems(weight: fx.Node, spec: UnshardSpec, given: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Why a table cannot stay sharded, and what to do instead."""
    flat, text = weight.args[:2]
    assert isinstance(flat, fx.Node)
    reads = [read for read in flat.users if read is weight or (read.target in READS and read.args[1] == text)]
    if any(user.target is not functional.embedding for read in reads for user in read.users):
        yield "its weight is read in other ways too, so it is gathered anyway", "embedding='gathered'"
    if spec.dim != 0:
        yield f"its weight is sharded on dimension {spec.dim}", "Shard(0) for it"
    if given["sparse"]:
        yield "sharded gradients are dense", "sparse=False"
    if spec.gather_format:
        yield "gather_dtype sends parameters in fewer bits, and rows are sent as they are", "embedding='gathered'"
    if spec.hook:
        yield "a communication hook of the user's reduces full gradients", "embedding='gathered'"
    if spec.compute:
        yield "its shard is offloaded to the host", "no offload_policy for its unit"
    if spec.post_forward_size > 1:
        yield "parts of its weight are kept from forward to backward", "reshard_after_forward=True for its unit"
