"""How AOTAutograd describes what a forward graph returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors

from fsdp_compile._torch.dynamo import aot_autograd, functorch_config, is_saved_for_backward

pytestmark = pytest.mark.core


def test_every_class_for_saved_values_is_known() -> None:
    kinds = {name: kind for name, kind in vars(descriptors).items() if name.startswith("SavedForBackwards")}
    assert "SavedForBackwardsAOTOutput" in kinds
    for kind in kinds.values():
        assert is_saved_for_backward(kind(0))


def test_what_is_returned_is_told_from_what_is_saved() -> None:
    forwards: list[fx.GraphModule] = []

    def forward_compiler(gm: fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        forwards.append(gm)
        return gm.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=forward_compiler, bw_compiler=lambda gm, _inputs: gm.forward)
    with functorch_config.patch(enable_autograd_cache=False):
        torch.compile(lambda x: x.sin().cos(), backend=backend)(torch.ones(2, requires_grad=True))
    (forward,) = forwards
    output = forward.graph.output_node()
    (returned,) = output.args
    assert isinstance(returned, tuple | list)
    is_saved = [is_saved_for_backward(note) for note in output.meta["desc"]]
    assert len(is_saved) == len(returned)
    assert is_saved[0] is False
    assert any(is_saved)
