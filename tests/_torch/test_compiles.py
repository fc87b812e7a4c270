"""What Dynamo is about to compile is described for one backend alone, and costs others nothing."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from torch import fx
from torch._dynamo import utils

from fsdp_compile._torch.dynamo import FrameToCompile, before_each_compile


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
