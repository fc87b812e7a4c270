"""What is read of Dynamo and AOTAutograd: frames before they are compiled, and kinds of what forwards return."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import fx
from torch._dynamo import utils
from torch._functorch._aot_autograd import descriptors

from fsdp_compile._torch.dynamo import FrameToCompile, before_each_compile, is_saved_for_backward


def _mine(gm: fx.GraphModule, _inputs: object) -> Callable[..., object]:
    return gm.forward


def _others(gm: fx.GraphModule, _inputs: object) -> Callable[..., object]:
    return gm.forward


def test_frames_of_other_backends_are_not_described() -> None:
    seen: list[FrameToCompile] = []
    with mock.patch.object(utils, "_recompile_user_contexts", None):
        before_each_compile(_mine, seen.append)
        for backend in (_others, _mine):
            torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert len(seen) == 1


@pytest.mark.core
def test_every_class_for_saved_values_is_known() -> None:
    kinds = {name: kind for name, kind in vars(descriptors).items() if name.startswith("SavedForBackwards")}
    assert "SavedForBackwardsAOTOutput" in kinds
    for kind in kinds.values():
        assert is_saved_for_backward(kind(0))
    assert not is_saved_for_backward(descriptors.PlainAOTOutput(0))
