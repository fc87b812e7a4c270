"""The first call of a plain model, and gradients that are never accumulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import fully_shard
from tests import long
from tests.models.kinds import WIDTH, Slim, Stack
from tests.numerics.one_process.measure import gradient_difference
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import Run, WithOneProcess


class ReadEarly(Stack):
    """Reads parameters in code that Dynamo leaves to Python, before its first graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    @torch._dynamo.disable
    def early(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.early(x))


@pytest.mark.long
@on_ranks()
def test_parameters_read_before_the_first_graph_get_their_gradients() -> None:
    pair = WithOneProcess(ReadEarly, Run.PLAIN, shape=WIDTH, rows=4, twice=False)
    worst = []
    for _ in range(3):
        pair.backward()
        worst.append(gradient_difference(*pair))
        pair.zero_grad()
    assert max(worst) < 1e-5


class PartlyUsed(nn.Module):
    """Uses one layer or both."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, both: str) -> torch.Tensor:
        return self.b(self.a(x)) if both == "both" else self.a(x)


@pytest.mark.long
@on_ranks()
def test_gradients_that_were_never_accumulated_are_forgotten() -> None:
    model = PartlyUsed()
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    x = torch.ones(2, WIDTH, requires_grad=True)
    torch.autograd.grad(compiled(x, "both").sum(), x)
    compiled(x, "one").sum().backward()
    assert model.a.weight.grad is not None
    assert model.b.weight.grad is None


def _one_padded_slot() -> float:
    pair = WithOneProcess(lambda: nn.Linear(6, 7, bias=False), Run.PLAIN, twice=False)
    pair.backward()
    return gradient_difference(*pair)


@long.parametrize("world_size", [1, 2], always=[2])
def test_a_flat_shard_of_one_padded_slot(world_size: int) -> None:
    assert max(run_ranks(_one_padded_slot, world_size=world_size)) < 1e-6


class Looked(nn.Module):
    """Has integers for input: nothing to cast."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x.long() % 7).mean(1))


HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
WIDE_OUTPUT = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
Compile = Callable[[nn.Module, MixedPrecisionPolicy], Callable[[torch.Tensor], torch.Tensor]]


def _options(policy: MixedPrecisionPolicy) -> dict[str, Any]:
    return {"lower": "eager", "mp_policy": policy}


def _as_module(model: nn.Module, policy: MixedPrecisionPolicy) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(model, backend="fsdp", options=_options(policy))


def _sharded_before(model: nn.Module, policy: MixedPrecisionPolicy) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(fully_shard(model, mp_policy=policy), backend="fsdp", options={"lower": "eager"})


def _outputs(make: Callable[[], nn.Module], policy: MixedPrecisionPolicy, form: Compile) -> list[torch.Tensor]:
    """Of the first call and of the second one, or the refusal."""
    torch.manual_seed(0)
    call = form(make(), policy)
    batch = torch.arange(4 * WIDTH).reshape(4, WIDTH)
    batch = batch if make is Looked else batch / WIDTH
    return [call(batch).detach() for _ in range(2)]


@long.parametrize(
    ("make", "policy"),
    [
        (Slim, HALF),
        (Slim, WIDE_OUTPUT),
        (Looked, WIDE_OUTPUT),
        (Looked, HALF),
    ],
    always=[(Slim, HALF)],
)
def test_the_first_call_casts_as_those_after_it(make: Callable[[], nn.Module], policy: MixedPrecisionPolicy) -> None:
    mine = run_ranks(_outputs, make, policy, _as_module)
    assert mine[0][0].dtype is (policy.output_dtype or torch.bfloat16)
    torch.testing.assert_close(mine, run_ranks(_outputs, make, policy, _sharded_before), rtol=0, atol=0)
