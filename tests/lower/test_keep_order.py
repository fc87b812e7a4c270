"""Inductor's code has collectives, waits and matmuls in the order of the graph, also where kernels are fused across."""

from __future__ import annotations

import dataclasses
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.utils import run_and_get_code

import fsdp_compile.lower.inductor
from fsdp_compile import fully_shard
from fsdp_compile.lower.inductor import KEEP_OUR_ORDER
from fsdp_compile.lower.keep_order import PlaceLate
from fsdp_compile.lower.written_order import Call, written_calls
from tests.fake_world import fake_world
from tests.models.layers import InARow, Residual

collectives = torch.ops._c10d_functional


def _two_kernels_that_read_the_same(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first = x.sin()
    gathering = collectives.all_gather_into_tensor(w, 2, dist.group.WORLD.group_name)  # type: ignore[union-attr]
    meanwhile = torch.mm(x, x)
    gathered = collectives.wait_tensor(gathering)
    last = torch.mm(gathered, x)
    return first, meanwhile, last * x.cos()


def _order(settings: dict[str, Any]) -> list[str]:
    torch.compiler.reset()
    x = torch.ones(16, 16)
    with fake_world(2), torch.no_grad():
        compiled = torch.compile(_two_kernels_that_read_the_same, options=settings)
        _, (code,) = run_and_get_code(compiled, x, torch.ones(8, 16))
    return [call.operator for call in written_calls(code)]


@pytest.mark.inductor
def test_a_fused_kernel_pulls_no_wait_ahead() -> None:
    planned = ["all_gather_into_tensor", "mm", "wait_tensor", "mm"]
    assert _order(dict(KEEP_OUR_ORDER)) == planned
    # What it is for: by itself, Inductor puts both kernels where the first one was, and what the second needs before.
    assert _order({name: value for name, value in KEEP_OUR_ORDER.items() if "custom_pass" not in name}) != planned


def _two_sums_that_read_the_same(x: torch.Tensor) -> torch.Tensor:
    first = torch.mm(x, x)
    of_first = (first * x).sum(0)
    second = torch.mm(first, x)
    return torch.cat([of_first, (second * x).sum(0)])


@pytest.mark.inductor
def test_a_sum_does_not_wait_for_another_one_while_what_it_reads_could_be_freed() -> None:
    torch.compiler.reset()
    settings: dict[str, Any] = dict(KEEP_OUR_ORDER)
    compiled = torch.compile(_two_sums_that_read_the_same, options=settings)
    _, (code,) = run_and_get_code(compiled, torch.ones(64, 64))
    kernels = re.findall(r"^ +(extern_kernels\.mm|cpp_fused)", code[code.index("def call(") :], re.M)
    assert kernels == ["extern_kernels.mm", "cpp_fused", "extern_kernels.mm", "cpp_fused"]


@pytest.mark.long
@pytest.mark.inductor
def test_matmuls_are_among_what_every_compile_compares() -> None:
    found: list[tuple[str, list[str]]] = []

    def note(planned: list[Call], code: str, phase: str) -> list[str]:
        found.append((phase, real(planned, code, phase)))
        return found[-1][1]

    real = fsdp_compile.lower.inductor.compare
    with fake_world(2), mock.patch.object(fsdp_compile.lower.inductor, "compare", note):
        torch.manual_seed(0)
        model = InARow([Residual(32, 64), Residual(32, 64), nn.Linear(32, 32, bias=False)])
        fully_shard(model)
        torch.compile(model, backend="fsdp")(torch.ones(4, 32)).sum().backward()
    assert [phase for phase, _ in found] == ["forward", "backward"]
    for _, compared in found:
        assert {"all_gather_into_tensor_coalesced", "wait_tensor", "mm"} <= set(compared)


@dataclasses.dataclass(eq=False)
class _Node:
    """As much of a node of Inductor's scheduler as is asked for."""

    name: str
    max_order: int
    reads: tuple[str, ...] = ()

    def get_buffer_names(self) -> set[str]:
        return {self.name}

    @property
    def unmet_dependencies(self) -> list[Any]:
        return [_Dependency(name) for name in self.reads]


@dataclasses.dataclass(frozen=True)
class _Dependency:
    name: str


def _placed(*nodes: _Node) -> list[str]:
    return [node.name for node in PlaceLate()(list(nodes))]


def test_a_fused_kernel_moves_to_its_last_part() -> None:
    assert _placed(_Node("fused", 3), _Node("a", 1), _Node("b", 2)) == ["a", "b", "fused"]


def test_a_fused_kernel_stays_before_its_first_reader() -> None:
    nodes = _Node("fused", 3), _Node("a", 1), _Node("reader", 2, ("fused",))
    assert _placed(*nodes) == ["a", "fused", "reader"]


def test_what_a_reader_needs_stays_before_it_through_others() -> None:
    nodes = _Node("x", 9), _Node("y", 8, ("x",)), _Node("z", 7, ("y",)), _Node("a", 1), _Node("end", 2, ("z",))
    assert _placed(*nodes) == ["a", "x", "y", "z", "end"]
