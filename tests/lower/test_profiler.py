"""Ranges that torch's profiler shows of a training step: FSDP2's names, per unit and phase."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fsdp_compile import fully_shard
from tests import long
from tests.ranks import run_ranks
from tests.two_sides import compile_in_place


class _Layer(nn.Linear):
    """A layer of the user's: of torch's own, compiled in place, nothing is compiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class _Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(64, 64, bias=False), _Layer(64, width, bias=False)])
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x * self.scale


def _sharded(width: int = 64) -> _Model:
    torch.manual_seed(0)
    model = _Model(width)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _profiled(called: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """The events of the second step."""
    x = torch.ones(2, 64)
    called(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        called(x).sum().backward()
    return list(profiler.events() or [])


def _named(called: Callable[[torch.Tensor], torch.Tensor]) -> Counter[str]:
    """How often each range is in the second step."""
    return Counter(event.name for event in _profiled(called) if event.name.startswith("FSDP::"))


def _ranges(options: dict[str, Any]) -> Counter[str]:
    return _named(torch.compile(_sharded(), backend="fsdp", options=options))


def test_a_message_of_several_units_names_them() -> None:
    seen, _ = run_ranks(_ranges, {"lower": "eager", "prefetch": 1, "bucket_mb": 1})
    assert seen["FSDP::all_gather (layers.0, layers.1)"] == 1


def _inside(options: dict[str, Any]) -> tuple[Counter[str], Counter[tuple[str, int]]]:
    """How often a second step starts collectives in each range, and waits in each for how many elements."""
    starts: Counter[str] = Counter()
    waits: Counter[tuple[str, int]] = Counter()
    for event in _profiled(torch.compile(_sharded(32), backend="fsdp", options=options)):
        name = _range_of(event)
        if event.name == "_c10d_functional::wait_tensor" and name:
            waits[name, math.prod(event.input_shapes[0])] += 1
        elif event.name.startswith("_c10d_functional::") and name:
            starts[name] += 1
    return starts, waits


def _range_of(event: Any) -> str:
    above = event.cpu_parent
    while above is not None and not above.name.startswith("FSDP::"):
        above = above.cpu_parent
    return "" if above is None else str(above.name)


SIZES = {"": 128, " (layers.0)": 64 * 64, " (layers.1)": 64 * 32}
"""Elements of each unit's message on two ranks, which tell whose it is; 32 of the outermost one's are padding."""
TIMES = {"": 1, " (layers.0)": 1, " (layers.1)": 2}
"""How often each is gathered: the outermost unit is kept for backward; the first layer needs no weight there."""


@pytest.mark.inductor
@long.parametrize("lowered", ["inductor", "eager"], always=["eager"])
def test_a_collective_is_called_in_the_range_of_its_unit(lowered: str) -> None:
    for starts, waits in run_ranks(_inside, {"prefetch": 1, "bucket_mb": 0, "lower": lowered}):
        gathered = {f"FSDP::all_gather{unit}": times for unit, times in TIMES.items()}
        assert starts == gathered | {f"FSDP::post_backward_reduce{unit}": 1 for unit in SIZES}
        arrived = {(f"FSDP::all_gather_copy_out{unit}", n): TIMES[unit] for unit, n in SIZES.items()}
        assert waits == arrived | {(f"FSDP::post_backward_rs_wait{unit}", n // 2): 1 for unit, n in SIZES.items()}


def _shared_graph() -> Counter[str]:
    model = _sharded()
    for layer in model.layers:
        compile_in_place(layer)
    return _named(model)


def test_layers_that_share_a_graph_have_ranges_under_their_own_names() -> None:
    seen, _ = run_ranks(_shared_graph)
    for layer in ("layers.0", "layers.1"):
        assert seen[f"FSDP::all_gather ({layer})"] > 0
        assert seen[f"FSDP::post_backward_reduce ({layer})"] > 0
