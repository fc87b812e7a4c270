"""Casts parameters before they are gathered instead of after it, where every reader wants the same narrower dtype.

    %w = unshard(%flat, "... param=float32 ...") -> %w = unshard(%flat, "... param=bfloat16 ...")
    %c = convert_element_type(%w, bfloat16)

`torch.autocast` casts a weight where it is used. The cast rounds each element by itself, so that it gives the same bits
on the shards, and half the bytes are sent. A parameter with any other reader in the graph, a norm in float32 say, is
gathered as it is stored. Gradients are reduced in the dtype that they had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from fsdp_compile.ir.edit import infer_value, set_read_text
from fsdp_compile.ir.graph import KEY, record_of
from fsdp_compile.ir.queries import TEXT_POSITION, is_alias, read_text, unsharded_value
from fsdp_compile.layout.flat_layout import AUTOCAST_BYTES
from fsdp_compile.layout.spec import UnshardSpec, parse
from fsdp_compile.ops.unshard import REDUCE_GRAD, UNSHARD

aten = torch.ops.aten


@dataclasses.dataclass
class _Uses:
    """What is made of a parameter.

    Attributes:
        views: Views of it that are not cast, in graph order.
        casts: Of it, or of such a view.
        others: Whether anything else reads it, or a view of it.
    """

    views: list[fx.Node] = dataclasses.field(default_factory=list)
    casts: list[fx.Node] = dataclasses.field(default_factory=list)
    others: bool = False


def cast_before_gather(graph: fx.Graph) -> None:
    """Rewrites the reads of a joint graph, or of a forward graph without a backward."""
    parameters: dict[tuple[fx.Node, str], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in TEXT_POSITION:
            parameters.setdefault((node.args[0], read_text(node)), []).append(node)
    for (flat, text), markers in parameters.items():
        reads = [marker for marker in markers if marker.target is UNSHARD]
        if any(marker.target not in (UNSHARD, REDUCE_GRAD) for marker in markers) or any(map(unsharded_value, reads)):
            continue
        uses, spec = _uses_of(reads), parse(text)
        dtype = _narrower(spec, uses)
        if dtype is None:
            continue
        sent = dataclasses.replace(spec, param_dtype=dtype)
        # The result is verified by the record of the flat parameter. That of a region, called with several, has none.
        if (record := record_of(flat)) is not None:
            specs = tuple(sent if spec.offset == sent.offset else spec for spec in record.specs)
            flat.meta[KEY] = dataclasses.replace(record, specs=specs)
        for marker in markers:
            set_read_text(marker, sent.text)
        for node in (*reads, *uses.views):
            node.meta["val"] = infer_value(node)
        for cast in uses.casts:
            (source,) = cast.all_input_nodes
            cast.replace_all_uses_with(source)
            graph.erase_node(cast)


def casts_of(read: fx.Node) -> list[fx.Node]:
    """Casts of a parameter to a dtype that it could be sent in."""
    stored = parse(read_text(read)).param_dtype
    return [cast for cast in _uses_of([read]).casts if _is_narrower(cast.meta["val"].dtype, stored)]


def _narrower(spec: UnshardSpec, uses: _Uses) -> torch.dtype | None:
    """The one dtype that all readers cast to, if it is a narrower floating one that is not sent yet."""
    dtypes = {cast.meta["val"].dtype for cast in uses.casts}
    if uses.others or spec.size == 1 or spec.gather_format or len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    return dtype if _is_narrower(dtype, spec.param_dtype) else None


def _is_narrower(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether a parameter can be sent in a dtype instead: slots are aligned in so many bytes."""
    return dtype.itemsize == AUTOCAST_BYTES < stored.itemsize and dtype.is_floating_point and stored.is_floating_point


def _uses_of(markers: Sequence[fx.Node]) -> _Uses:
    uses = _Uses()
    todo = [(marker, user) for marker in markers for user in marker.users]
    while todo:
        value, user = todo.pop()
        if _is_cast(user, value):
            uses.casts.append(user)
        elif is_alias(user) and user.all_input_nodes == [value] and _dtype(user) == _dtype(value):
            uses.views.append(user)
            todo.extend((user, further) for further in user.users)
        else:
            uses.others = True
    uses.views.sort()  # nodes compare by their place in the graph
    return uses


def _is_cast(node: fx.Node, value: fx.Node) -> bool:
    """Whether a node changes nothing but the dtype of a value, inside of the graph."""
    if node.target is aten._to_copy.default:
        changes_dtype_alone = set(node.kwargs) == {"dtype"}
    else:
        changes_dtype_alone = node.target is torch.ops.prims.convert_element_type.default
    return (
        changes_dtype_alone
        and node.meta["val"].stride() == value.meta["val"].stride()
        # What a graph returns is the user's: it may not be memory that is freed.
        and all(user.op != "output" for user in node.users)
    )


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta["val"], "dtype", None)
