"""The CUDA code of a small Llama in bfloat16 on 8 ranks: order, copies, memory, launches, machine code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

pytest.importorskip("triton", reason="pip install -e '.[cuda-code]' brings Triton, which compiles the kernels")

from fsdp_compile.ir.graph import Phase
from tests.cuda import checks
from tests.cuda.generate import Case, Code, generate
from tests.cuda.pretended_gpu import SM_90
from tests.cuda.wrapper import Wrapper

BOTH = pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.value)
pytestmark = [pytest.mark.inductor, pytest.mark.optional]


@pytest.fixture(scope="module")
def codes() -> Mapping[Phase, Code]:
    return generate(
        Case(sharding={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)})
    )


@BOTH
def test_communication_is_in_the_planned_order(codes: Mapping[Phase, Code], phase: Phase) -> None:
    checks.order_is_planned(codes[phase])


@BOTH
def test_matmuls_read_what_was_gathered_where_it_is(codes: Mapping[Phase, Code], phase: Phase) -> None:
    checks.no_gathered_matrix_is_copied(codes[phase])


def test_matmuls_write_gradients_into_messages(codes: Mapping[Phase, Code]) -> None:
    checks.no_gradient_is_copied(codes[Phase.BACKWARD])


@BOTH
def test_the_host_waits_for_nothing(codes: Mapping[Phase, Code], phase: Phase) -> None:
    checks.host_goes_on(codes[phase])


@BOTH
def test_gathered_memory_is_freed_once(codes: Mapping[Phase, Code], phase: Phase) -> None:
    checks.gathered_memory_is_freed_once(codes[phase])


@BOTH
def test_every_kernel_compiles(codes: Mapping[Phase, Code], phase: Phase, tmp_path: Path) -> None:
    checks.kernels_compile(codes[phase], SM_90, tmp_path)


# Launches of both layers, embedding and head. Each layer takes one for the cast of its messages before each gather.
LAUNCHES = {Phase.FORWARD: 24, Phase.BACKWARD: 37}


@BOTH
def test_no_more_kernels_are_launched_than_before(codes: Mapping[Phase, Code], phase: Phase) -> None:
    launches = list(Wrapper(codes[phase].wrapper).launches())
    assert len(launches) <= LAUNCHES[phase], "\n".join(str(launch) for _, launch in launches)
