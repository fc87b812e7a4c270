"""Copies of inputs that forward updates, which backward reads under the name that they have in forward."""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compile.partition.partition import save_copies_of_updated_inputs

aten = torch.ops.aten


def test_a_copy_has_one_name_in_both_graphs_also_where_backward_has_copies_of_its_own() -> None:
    forward, backward = fx.Graph(), fx.Graph()
    updated = forward.placeholder("primals_1")
    updated.meta["val"] = torch.ones(2, device="meta")
    doubled = forward.call_function(aten.mul.Tensor, (updated, 2))
    forward.call_function(aten.copy_.default, (updated, doubled))
    forward.output((doubled, updated))
    saved = backward.placeholder("primals_1")
    backward.output((backward.call_function(aten.clone.default, (saved,)),))

    save_copies_of_updated_inputs(forward, backward, 1)

    returned = forward.output_node().args[0]
    assert isinstance(returned, tuple)
    (found,) = backward.find_nodes(op="placeholder")
    assert isinstance(returned[1], fx.Node)
    assert found.name == returned[1].name != "primals_1"
