"""Models that reach their parameters in unusual ways, and first calls, train to the numbers of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import UnsupportedModelError, fully_shard
from tests import long
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Slim, Stack
from tests.models.unusual import KINDS
from tests.numerics.one_process.measure import Differences, batches, gradient_difference, train_pair
from tests.numerics.one_process.test_model_kinds import assert_equal_training
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import Run, WithOneProcess, loss_of

LEFT_TO_PYTHON = ("recurrent", "recurrent-first", "experts")
"""No frame of these reaches the backend: they have to be sharded before."""


def _kind(name: str, *, sharded_before: bool, lower: str = "eager") -> Differences:
    return train_pair(KINDS[name], prepare=fully_shard if sharded_before else None, lower=lower)


@pytest.mark.core
@long.parametrize(
    "name",
    [name for name in KINDS if name not in LEFT_TO_PYTHON],
    always=["several-dtypes"],
)
def test_sharded_at_the_first_call(name: str) -> None:
    assert_equal_training(run_ranks(_kind, name, sharded_before=False))


@pytest.mark.core
@long.parametrize("name", [*LEFT_TO_PYTHON, "penalty-of-blocks"], always=["penalty-of-blocks"])
def test_sharded_before_the_compile(name: str) -> None:
    assert_equal_training(run_ranks(_kind, name, sharded_before=True))


@pytest.mark.long
@pytest.mark.parametrize("name", ["reads-of-another"])
def test_through_inductor(name: str) -> None:
    assert_equal_training(run_ranks(_kind, name, sharded_before=False, lower="inductor"))


class _OwnForwardAtTheTop(Stack):
    """The outermost module has a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.through_all  # type: ignore[method-assign]

    def through_all(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x @ self.head.weight.t()


@on_ranks()
def test_a_forward_of_the_instances_own() -> None:
    torch.manual_seed(0)
    model = _OwnForwardAtTheTop()
    reference = copy.deepcopy(model)
    fully_shard(model)
    call = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    (batch,) = batches(1, 4)
    loss_of(call(batch)).backward()
    loss_of(reference(batch)).backward()
    weight, expected = model.head.weight.grad, reference.head.weight.grad
    assert expected is not None
    assert model.head.bias.grad is None
    assert (weight.full_tensor() - expected).abs().max().item() < 1e-5  # type: ignore[union-attr]


class _Slow(nn.Module):
    """A teacher that follows the student inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(32, 5), nn.Linear(32, 5).requires_grad_(requires_grad=False)

    @torch.no_grad()
    def follow(self) -> None:
        for mine, slow in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            slow.mul_(0.9).add_(mine, alpha=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.follow()
        return self.student(x) - self.teacher(x)


class _Clamped(nn.Module):
    """Writes into what a read gives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return x * self.weight


@pytest.mark.parametrize(("make", "line"), [(_Slow, "slow.mul_"), (_Clamped, "clamp_")])
def test_updates_inside_of_a_graph_are_refused_with_their_line(make: Callable[[], nn.Module], line: str) -> None:
    with fake_world(2), pytest.raises(BackendCompilerFailed) as caught:
        torch.compile(make(), backend="fsdp", options={"lower": "eager"})(torch.ones(2, 32))
    error = caught.value.inner_exception
    assert isinstance(error, UnsupportedModelError)
    assert "changes a gathered parameter in place" in error.what
    assert line in (error.where or "")
    assert "between steps" in (error.instead or "")


@pytest.mark.long
@on_ranks()
def test_optimizers_of_plain_parameters_step_as_always() -> None:
    """Another model's optimizer, and one of the ignored parameters of a compiled model, step as always."""
    other = nn.Linear(32, 5)
    model = Stack()
    fully_shard(model, ignored_params=[model.head])
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    torch.compile(nn.Linear(2, 2), backend="fsdp")
    for call in (compiled, other):
        loss_of(call(torch.ones(4, 32))).backward()
    for parameters in (list(other.parameters()), list(model.head.parameters())):
        before = [p.clone() for p in parameters]
        torch.optim.SGD(parameters, lr=0.1).step()
        assert not any(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))


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
