"""The CUDA code of everything that changes what a graph sends, keeps or updates; and for other devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import CPUOffloadPolicy

pytest.importorskip("triton", reason="pip install -e '.[cuda-code]' brings Triton, which compiles the kernels")

from fsdp_compile import MixedPrecision, step_in_backward, units
from fsdp_compile.ir.graph import Phase
from fsdp_compile.layout.spec import GradPlacement
from fsdp_compile.lower import written_order
from tests.cuda import checks
from tests.cuda.generate import BF16, Case, generate
from tests.cuda.llama import SMALL, Sizes
from tests.cuda.pretended_gpu import SM_80, SM_90, SM_100
from tests.cuda.wrapper import Wrapper

pytestmark = [pytest.mark.inductor, pytest.mark.optional, pytest.mark.long]
EIGHT_BITS = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, gather_dtype=torch.float8_e4m3fn)


def _case(**changes: Any) -> Case:
    return dataclasses.replace(Case(sharding=BF16), **changes)


def _with(**sharding: Any) -> Mapping[str, Any]:
    return {**BF16, **sharding}


def _updates_in_backward(model: nn.Module) -> None:
    step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))


def _does_not_reduce(model: nn.Module) -> None:
    model.set_requires_gradient_sync(False)  # type: ignore[operator]


def _does_not_average_over_replicas(model: nn.Module) -> None:
    model.set_requires_all_reduce(False)  # type: ignore[operator]


def _has_unreduced_gradients(model: nn.Module) -> None:
    for group in (group for unit in units(model) for group in unit.groups):
        sums = torch.empty(group.pending.numel(GradPlacement.UNREDUCED), dtype=torch.bfloat16)
        group.pending.add(GradPlacement.UNREDUCED, sums, [each.spec.offset for each in group.params])
        group.pending.placements.add(GradPlacement.UNREDUCED)


CASES = {
    "8-bit gathers": _case(sharding={"mp_policy": EIGHT_BITS}),
    "mxfp8 gathers": _case(sharding={"mp_policy": dataclasses.replace(EIGHT_BITS, gather_dtype="mxfp8")}),
    "nvfp4 gathers": _case(sharding={"mp_policy": dataclasses.replace(EIGHT_BITS, gather_dtype="nvfp4")}),
    "hybrid sharding": _case(replicas=2),
    "hybrid sharding, no sum over replicas": _case(replicas=2, after=_does_not_average_over_replicas),
    "a part of each parameter kept": _case(sharding=_with(reshard_after_forward=2)),
    "offloaded to the host": _case(sharding=_with(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "embedding that stays sharded": _case(options={"embedding": "sharded"}),
    "accumulating": _case(after=_does_not_reduce),
    "reducing what was accumulated": _case(after=_has_unreduced_gradients),
    "updates in backward": _case(before=_updates_in_backward),
    "a budget of memory": _case(options={"memory_budget_gb": 0.6}),
    "autocast": _case(sharding={}, dtype=torch.float32, autocast=True),
    "FSDP1's rules": _case(options={"prefetch": "BACKWARD_PRE"}),
    "FSDP2's messages": _case(options={"reduce_layout": "fsdp2"}),
    "several kernels in one": _case(options={"inductor": {"combo_kernels": True}}),
}  # fmt: skip
NOT_READ_IN_PLACE = {"8-bit gathers", "mxfp8 gathers", "nvfp4 gathers"}
"""Gathered as something else than what matmuls read."""
NOT_WRITTEN_IN_PLACE = {"accumulating", "reducing what was accumulated", "autocast", "FSDP2's messages"}
"""Gradients are added, cast or joined before they are sent, or not sent."""


@pytest.mark.parametrize("name", CASES)
def test_code(name: str, tmp_path: Path) -> None:
    codes = generate(CASES[name])
    assert set(codes) == set(Phase)
    embeddings = None if name in NOT_WRITTEN_IN_PLACE else int(name != "embedding that stays sharded")
    for code in codes.values():
        checks.all_hold(code, read_in_place=name not in NOT_READ_IN_PLACE, embeddings=embeddings)
        checks.kernels_compile(code, SM_90, tmp_path)
    if name == "hybrid sharding":
        checks.replicas_are_summed_in_place(codes[Phase.BACKWARD])


RECORDED = {"inductor": {"triton.cudagraphs": True}}


def test_cuda_graphs_are_recorded_of_whole_graphs() -> None:
    for code in generate(_case(options=RECORDED)).values():
        assert "def partition_0(" in code.wrapper
        assert len(written_order.not_recorded(code.wrapper)) == 0
        checks.order_is_planned(code)


UNRECORDED = {
    "fsdp_compile.update": CASES["updates in backward"],
    "fsdp_compile.average_rows": CASES["embedding that stays sharded"],
    "fsdp_compile.start_copy": CASES["offloaded to the host"],
}


@pytest.mark.parametrize("name", UNRECORDED)
def test_cuda_graphs_are_refused_of_what_the_host_takes_part_in(name: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=f"ConfigError: .*{name}.*, which no CUDA graph can record"):
        generate(dataclasses.replace(UNRECORDED[name], options={**UNRECORDED[name].options, **RECORDED}))


def test_parameters_kept_for_backward_are_the_only_gathered_memory_that_stays() -> None:
    codes = generate(_case(sharding=_with(reshard_after_forward=False)))
    forward, backward = (codes[phase] for phase in Phase)
    wrapper = Wrapper(forward.wrapper)
    frees = [wrapper.frees(name) for name in wrapper.gathered()]
    # All but the embedding's table, which backward does not read, and packed norms, of which copies are saved.
    assert len(frees) - sum(frees) == 7 * SMALL.layers + 2  # the head and the norm before it
    assert max(frees) == 1
    assert not Wrapper(backward.wrapper).gathered()
    checks.order_is_planned(backward)
    checks.no_gradient_is_copied(backward)


# Of 4 layers of Llama-3-8B on 64 ranks: from the attention of one layer to that of the next. Each sum for a norm is a
# launch of its own, in its place.
PER_LAYER = {Phase.FORWARD: [7, 7, 7], Phase.BACKWARD: [15, 15, 13]}


def test_layers_of_llama_3_8b(tmp_path: Path) -> None:
    for phase, code in generate(_case(sizes=Sizes(layers=4), ranks=64)).items():
        checks.all_hold(code)
        checks.kernels_compile(code, SM_90, tmp_path)
        launches = Wrapper(code.wrapper).launches_per_layer()
        assert all(own <= most for own, most in zip(launches, PER_LAYER[phase], strict=True)), launches


@pytest.mark.parametrize("architecture", [SM_80, SM_100], ids=lambda each: each.name)
def test_other_devices(architecture: Any, tmp_path: Path) -> None:
    sizes = dataclasses.replace(SMALL, layers=1)
    for code in generate(_case(sizes=sizes, architecture=architecture)).values():
        checks.order_is_planned(code)
        checks.kernels_compile(code, architecture, tmp_path)
