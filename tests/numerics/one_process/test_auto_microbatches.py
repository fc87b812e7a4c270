"""`reshard_after_forward="auto"` and budgets while gradients are accumulated: FSDP2's bits, room for what waits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

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
from tests.numerics.one_process.pair import batches, loss_of
from tests.ranks import run_ranks

SLOW = hardware("cpu", 0.01)


def _two_models() -> tuple[Any, Any]:
    """A compiled model, and the same one sharded by FSDP2."""
    models = []
    for shard in (fully_shard, fsdp2):
        torch.manual_seed(0)
        model: Any = Slim(2)
        options: dict[str, Any] = {"reshard_after_forward": "auto"} if shard is fully_shard else {}
        for part in (*model.blocks, model):
            shard(part, **options)
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot divide for FSDP2
        models.append(model)
    options = {"lower": "eager", "hardware": SLOW, "memory_budget_gb": 1.0}
    return torch.compile(models[0], backend="fsdp", options=options), models[1]


def _difference(mine: nn.Module, reference: nn.Module) -> float:
    worst = 0.0
    for p, q in zip(mine.parameters(), reference.parameters(), strict=True):
        assert isinstance(p.grad, DTensor)
        assert isinstance(q.grad, DTensor)
        worst = max(worst, (p.grad.to_local() - q.grad.to_local()).abs().max().item())
    return worst


def _train() -> tuple[list[float], int]:
    """Differences of each step of three microbatches, and units that backward gathers again."""
    pair = _two_models()
    world, rank = dist.get_world_size(), dist.get_rank()
    worst: list[float] = []
    saved: list[int] = []
    for step in range(2):
        for number, batch in enumerate(batches(3, 4 * world, seed=step)):
            for model in pair:
                model.set_requires_gradient_sync(number == 2)
                loss_of(model(batch.chunk(world)[rank])).backward()
            if step == 0:
                saved.append(len(_gathered_in_backward(pair[0])))
        worst.append(_difference(*pair))
        for model in pair:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    return worst, max(saved)


def _gathered_in_backward(model: nn.Module) -> list[str]:
    return [c.unit for graph in explain(model).backward for c in graph.collectives if c.kind is Kind.GATHER]


def test_microbatches_keep_units_for_backward_alone_and_give_the_bits_of_fsdp2() -> None:
    for worst, gathered_again in run_ranks(_train):
        assert worst == [0.0, 0.0]
        assert gathered_again == 0, "all that backward reads was saved by forward"


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
