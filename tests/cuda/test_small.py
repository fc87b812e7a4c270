"""The CUDA code of a small Llama in bfloat16 on 8 ranks: order, copies, memory, launches, machine code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="pip install -e '.[cuda-code]' brings Triton, which compiles the kernels")

from fsdp_compile.ir.graph import Phase
from tests.cuda import checks
from tests.cuda.generate import BF16, Case, Code, generate
from tests.cuda.pretended_gpu import SM_90
from tests.cuda.wrapper import Wrapper

BOTH = pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.value)
pytestmark = [pytest.mark.inductor, pytest.mark.optional]


@pytest.fixture(scope="module")
def codes() -> Mapping[Phase, Code]:
    return generate(Case(sharding=BF16))


CHECKS = [
    checks.order_is_planned,
    checks.no_gathered_matrix_is_copied,
    checks.host_goes_on,
    checks.gathered_memory_is_freed_once,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@BOTH
def test_code(codes: Mapping[Phase, Code], phase: Phase, check: Callable[[Code], None]) -> None:
    check(codes[phase])


def test_matmuls_write_gradients_into_messages(codes: Mapping[Phase, Code]) -> None:
    checks.no_gradient_is_copied(codes[Phase.BACKWARD])


@BOTH
def test_every_kernel_compiles(codes: Mapping[Phase, Code], phase: Phase, tmp_path: Path) -> None:
    checks.kernels_compile(codes[phase], SM_90, tmp_path)


# Launches of both layers, embedding and head. Each layer takes one for the cast of its messages before each gather.
LAUNCHES = {Phase.FORWARD: 24, Phase.BACKWARD: 37}


@BOTH
def test_no_more_kernels_are_launched_than_before(codes: Mapping[Phase, Code], phase: Phase) -> None:
    launches = list(Wrapper(codes[phase].wrapper).launches())
    assert len(launches) <= LAUNCHES[phase], "\n".join(str(launch) for _, launch in launches)
