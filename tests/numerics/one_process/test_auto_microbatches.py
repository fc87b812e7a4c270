"""`reshard_after_forward="auto"` and budgets while gradients are accumulated: FSDP2's bits, room for what waits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import fully_shard as fsdp2

from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.wire import Link
from benchmarks.peak import measured_peak_bytes
from fsdp_compile import explain, fully_shard, units
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.errors import BudgetTooSmallError
from fsdp_compile.layout.spec import GradPlacement
from tests.models.kinds import Slim
from tests.models.round_sizes import WIDTH, Stack
from tests.numerics.one_process.measure import batches
from tests.ranks import on_ranks
from tests.two_sides import WithFsdp2, sgd, share

SLOW = hardware("cpu", 0.01)


def _shard(model: Any, fully_shard: Any = fsdp2, **options: Any) -> None:
    for part in (*model.blocks, model):
        fully_shard(part, **options)
        part.set_force_sum_reduction_for_comms(True)  # gloo cannot divide for FSDP2


@on_ranks()
def test_microbatches_keep_units_for_backward_alone_and_give_the_bits_of_fsdp2() -> None:
    """Units that backward gathers again; two steps of three microbatches have FSDP2's bits."""
    pair = WithFsdp2(
        lambda: Slim(2),
        _shard,
        lambda step: share(batches(1, 4 * dist.get_world_size(), seed=step)[0]),
        ours=lambda model: _shard(model, fully_shard, reshard_after_forward="auto"),
        optimizer=sgd,
    )
    call = pair.compiled(fullgraph=False, hardware=SLOW, memory_budget_gb=1.0)
    saved: list[int] = []
    for step in range(2):
        for number in range(3):
            pair.change(lambda model: model.set_requires_gradient_sync(number == 2))  # noqa: B023  runs at once
            pair.backward()
            if step == 0:
                saved.append(len(_gathered_in_backward(call)))
        pair.compare_gradients()
        pair.update()
        pair.compare_parameters()
    assert max(saved) == 0, "all that backward reads was saved by forward"


def _gathered_in_backward(model: nn.Module) -> list[str]:
    return [c.unit for graph in explain(model).backward for c in graph.collectives if c.kind is Kind.GATHER]


def _accumulated_bytes(model: nn.Module) -> int:
    """Bytes of full gradients between microbatches."""
    groups = [group for unit in units(model) for group in unit.groups if group.pending]
    return sum(g.pending.numel(GradPlacement.UNREDUCED) * g.pending.dtype().itemsize for g in groups)


def _resharded(budget_bytes: int) -> Any:
    options: dict[str, Any] = {"lower": "eager", "hardware": SLOW, "activations": "saved"}
    options["memory_budget_gb"] = budget_bytes / 1e9
    return torch.compile(fully_shard(Stack(6)), backend="fsdp", options=options)


def _least_budget(x: torch.Tensor) -> int:
    """The smallest budget, to a byte, that compiles for a microbatch that is not reduced."""
    budget_bytes = 1_000_000
    while True:
        torch.compiler.reset()
        compiled = _resharded(budget_bytes)
        compiled.set_requires_gradient_sync(False)
        try:
            compiled(x).sum().backward()
        except (BackendCompilerFailed, BudgetTooSmallError) as error:
            cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
            assert isinstance(cause, BudgetTooSmallError)
            assert cause.least_bytes > budget_bytes
            budget_bytes = cause.least_bytes
        else:
            return budget_bytes


def test_a_budget_holds_gradients_of_earlier_microbatches() -> None:
    with emulated_world(2, Network(Link(bytes_per_s=1e15))):
        x = torch.randn(64, WIDTH)
        budget_bytes = _least_budget(x)
        torch.compiler.reset()
        compiled = _resharded(budget_bytes)
        compiled.set_requires_gradient_sync(False)

        def run() -> None:
            compiled(x).sum().backward()

        run()  # compiles
        peaks = []
        for _ in range(2):
            gradient_bytes = _accumulated_bytes(compiled)
            peaks.append(measured_peak_bytes(compiled, x, run, "cpu") + gradient_bytes)
    assert gradient_bytes == 6 * 4 * (WIDTH * WIDTH + 2 * WIDTH)
    assert max(peaks) <= budget_bytes
    assert max(peaks) > 0.9 * budget_bytes, "no more is asked for than is needed"
