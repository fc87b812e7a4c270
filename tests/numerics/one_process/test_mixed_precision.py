"""Mixed precision equals casts by hand: each rank's batch in one process, on a copy whose parameters were cast."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import MixedPrecision as FSDP1MixedPrecision
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile import MixedPrecision, fully_shard, no_sync, register_comm_hook, step_in_backward
from fsdp_compile._torch.fully_shard_params import HAS_GRAD_DTYPES
from fsdp_compile.config.policy import AnyPrecisionPolicy
from tests import long
from tests.models.kinds import WIDTH, Slim, Stack
from tests.numerics.one_process.measure import batches
from tests.ranks import on_ranks
from tests.sharding.models import Normed
from tests.two_sides import (
    MIXED,
    WithOneProcess,
    compare_gradients,
    compare_parameters,
    compile_eagerly,
    local,
    loss_of,
    made,
    sgd,
    share,
)

BF16 = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class ByHand:
    """What the reference casts: a model to its copy in low precision, inputs, gradients."""

    low: Callable[[nn.Module], nn.Module]
    inputs: torch.dtype
    reduced: torch.dtype


def _all(model: nn.Module) -> nn.Module:
    return model.to(BF16)


def _all_but_norms(model: nn.Module) -> nn.Module:
    for module in model.to(BF16).modules():
        if isinstance(module, nn.BatchNorm1d):
            module.float()
            module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            module.register_forward_hook(lambda _m, _args, output: output.to(BF16))
    return model


def _by_hand(reference: nn.Module, cast: ByHand, batch: torch.Tensor) -> list[torch.Tensor]:
    """The loss of each rank; gradients are left in `reference`, averaged in the reduction's dtype."""
    chunks = batch.chunk(dist.get_world_size())
    losses, sums = [], [torch.zeros_like(p, dtype=cast.reduced) for p in reference.parameters()]
    for rank, chunk in enumerate(chunks):
        low = cast.low(copy.deepcopy(reference))
        loss = loss_of(low(chunk.to(cast.inputs)))
        loss.backward()
        losses.append(loss.detach())
        for total, parameter in zip(sums, low.parameters(), strict=True):
            if parameter.grad is not None:
                total.add_(parameter.grad.to(cast.reduced))
        if rank == dist.get_rank():  # running statistics are each rank's own
            for mine, theirs in zip(reference.buffers(), low.buffers(), strict=True):
                if mine.dtype == theirs.dtype:
                    mine.copy_(theirs)
    for total, parameter in zip(sums, reference.parameters(), strict=True):
        parameter.grad = (total / len(chunks)).to(parameter.dtype)
    return losses


def train_both(make: Callable[[], nn.Module], prepare: Callable[[nn.Module], object], cast: ByHand) -> float:
    """Three steps of both; the largest difference of losses, and of parameters in learning rates."""
    pair = WithOneProcess(make, shard=prepare, optimizer=sgd, twice=False)
    rank, worst = dist.get_rank(), 0.0
    for step in range(3):
        (batch,) = batches(1, 4 * dist.get_world_size(), seed=step)
        loss = loss_of(pair.call(share(batch)))
        loss.backward()
        worst = max(worst, abs(loss.item() - _by_hand(pair.reference, cast, batch)[rank].item()))
        for mine, theirs in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
            assert mine.grad.dtype == mine.dtype == torch.float32, "accumulated in the parameter's dtype"
            worst = max(worst, (mine.grad.full_tensor() - theirs.grad).abs().max().item())
        pair.update()
    return worst


FOLLOWS = torch.float32 if HAS_GRAD_DTYPES else BF16
"""The dtype of reductions where a policy has none: from torch 2.15 on that in which parameters are stored."""
CASES: dict[str, tuple[Callable[[], nn.Module], AnyPrecisionPolicy, ByHand]] = {
    "policy": (Slim, MIXED, ByHand(_all, BF16, torch.float32)),
    "reduce-dtype-follows": (Slim, MixedPrecisionPolicy(BF16), ByHand(_all, BF16, FOLLOWS)),
    "no-cast-of-inputs": (Slim, MixedPrecisionPolicy(None, BF16), ByHand(lambda m: m, torch.float32, BF16)),
    "batch-norm-kept": (
        Normed,
        MixedPrecision(BF16, torch.float32, buffer_dtype=BF16),
        ByHand(_all_but_norms, BF16, torch.float32),
    ),
    "fsdp1": (
        Normed,
        FSDP1MixedPrecision(BF16, torch.float32, buffer_dtype=BF16),
        ByHand(_all_but_norms, BF16, torch.float32),
    ),
}


@pytest.mark.core
@long.parametrize("name", CASES, always=["reduce-dtype-follows", "fsdp1"])
@on_ranks()
def test_equals_casts_by_hand(name: str) -> None:
    make, policy, cast = CASES[name]
    # AOTAutograd's batch norm rounds otherwise than eager's, by float32's eps; bfloat16 around it makes 2^-8 of that.
    bound = 4e-3 if make is Normed else 0.0
    assert train_both(make, lambda model: fully_shard(model, mp_policy=policy), cast) <= bound


@on_ranks()
def test_each_unit_has_its_own_dtypes() -> None:
    def prepare(model: nn.Module) -> None:
        for block, policy in zip(model.blocks, (MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16)), strict=True):  # type: ignore[arg-type]
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=MIXED)

    def low(model: nn.Module) -> nn.Module:
        model.to(BF16)
        model.blocks[0].float().register_forward_pre_hook(lambda _, args: (args[0],))  # type: ignore[index, union-attr]
        model.blocks[1].register_forward_pre_hook(lambda _, args: (args[0].to(BF16),))  # type: ignore[index, union-attr]
        return model

    class Widened(Stack):
        """Its first block gets float32 whatever comes in."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks[1](self.blocks[0](x.float())))

    assert train_both(lambda: Widened(2), prepare, ByHand(low, BF16, torch.float32)) < 2e-3


@on_ranks()
def test_full_precision_in_eval() -> None:
    policy = MixedPrecision(BF16, torch.float32, buffer_dtype=BF16, full_precision_in_eval=True)
    model, reference = made(Normed), made(Normed).eval()
    fully_shard(model, mp_policy=policy)
    compiled = compile_eagerly(model)
    (batch,) = batches(1, 4)
    assert compiled.eval()(batch).dtype is torch.float32
    torch.testing.assert_close(compiled(batch), reference(batch), rtol=1e-6, atol=1e-6)
    assert model.seen == (torch.float32, torch.float32)
    for name, value in made(Normed).named_buffers():
        assert torch.equal(model.state_dict()[name], value), "not rounded on the way"
    loss_of(compiled(batch)).backward()  # gradients in eval mode are those of full precision, too
    loss_of(reference(batch)).backward()
    compare_gradients(model, reference, (1e-4, 1e-7))
    assert compiled.train()(batch).dtype is BF16
    assert model.seen == (BF16, BF16)


class _Half(nn.Module):
    """Two layers of one unit, and one of the root; code without gradients looks at a weight that is also trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.b.weight.abs().amax()
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x))) * scale))


EVALUATED: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "all": (nn.Module.eval, False),
    "all, updated in backward": (nn.Module.eval, True),
    "a part of a unit": (lambda model: model.b.eval(), False),
}
"""What is in eval mode, and whether the optimizer steps in backward."""


@long.parametrize("name", EVALUATED, always=["all, updated in backward"])
@on_ranks()
def test_gradients_accumulate_in_eval_mode_as_in_training(name: str) -> None:
    evaluate, in_backward = EVALUATED[name]
    # Only reductions are in another dtype in eval mode.
    policy = MixedPrecision(reduce_dtype=torch.float64, full_precision_in_eval=True)

    def shard(model: Any) -> None:
        fully_shard([model.a, model.b], mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        evaluate(model)

    pair = WithOneProcess(_Half, shard=shard, optimizer=sgd, shape=WIDTH, rows=4, twice=False)
    optimizer = pair.optimizers[0][0]
    if in_backward:
        step_in_backward(optimizer)
    steps: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append("step"))
    for _ in range(2):
        before = len(steps)
        with no_sync(pair.model):
            for _ in range(2):
                pair.backward()
        assert len(steps) == before
        assert all(p.grad is None for p in pair.model.parameters())
        pair.backward()
        pair.update()
        compare_parameters(pair.model, pair.reference, (1e-4, 1e-6))


@on_ranks()
def test_a_hook_compresses_no_sums_of_microbatches_in_eval_mode() -> None:
    """A gradient of three microbatches of 257, which bfloat16 rounds to 256, and one of 1."""
    model = nn.Linear(1, 4, bias=False)
    fully_shard(model, mp_policy=MixedPrecision(reduce_dtype=torch.float32, full_precision_in_eval=True))
    register_comm_hook(model, bf16_compress_hook)
    model.eval()
    run = compile_eagerly(model)
    for value in (257.0, 257.0, 257.0):
        with no_sync(model):
            run(torch.full((1, 1), value)).sum().backward()
    run(torch.ones(1, 1)).sum().backward()
    assert isinstance(model.weight.grad, DTensor)
    assert model.weight.grad.full_tensor().flatten().tolist() == [772.0] * 4


@on_ranks(world_size=1)
def test_eval_is_mixed_unless_asked() -> None:
    compiled = compile_eagerly(fully_shard(Stack(1), mp_policy=MixedPrecision(BF16)))
    assert compiled.eval()(torch.ones(2, WIDTH)).dtype is BF16


@on_ranks()
def test_low_precision_gradients_are_kept_if_asked() -> None:
    policies = (MixedPrecision(BF16, torch.float32, keep_low_precision_grads=keeps) for keeps in (True, False))
    model, full = (fully_shard(made(lambda: Slim(1)), mp_policy=policy) for policy in policies)
    sums: dict[nn.Parameter, torch.Tensor] = {}
    for batch in batches(2, 4):
        for each in (model, full):
            loss_of(compile_eagerly(each)(batch)).backward()
        for mine, theirs in zip(model.parameters(), full.parameters(), strict=True):
            new = local(theirs.grad)
            assert new.dtype is torch.float32
            sums[mine] = (sums[mine].float() + new if mine in sums else new).to(BF16)
        full.zero_grad()
    for mine in model.parameters():
        assert isinstance(mine.grad, DTensor)
        assert (mine.grad.dtype, mine.dtype) == (BF16, torch.float32)
        assert torch.equal(mine.grad.to_local(), sums[mine])


class _Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x.long() % 7).mean(1))


OUTPUT = dataclasses.replace(MIXED, output_dtype=torch.float32)
CALLED = [(make, policy) for make in (Slim, _Looked) for policy in (MIXED, OUTPUT)]


@long.parametrize(("make", "policy"), CALLED, always=[(Slim, MIXED), (_Looked, OUTPUT)])
@on_ranks()
def test_the_first_call_casts_as_those_after_it(make: type[nn.Module], policy: MixedPrecisionPolicy) -> None:
    batch = torch.arange(4 * WIDTH).reshape(4, WIDTH)
    batch = batch if make is _Looked else batch / WIDTH
    calls = (
        compile_eagerly(made(make), mp_policy=policy),
        compile_eagerly(fully_shard(made(make), mp_policy=policy)),
    )
    mine, theirs = ([call(batch) for _ in range(2)] for call in calls)
    assert mine[0].dtype is (policy.output_dtype or BF16)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    for outputs in (mine, theirs):
        torch.stack(outputs).sum().backward()
    compare_gradients(*calls, (0.0, 0.0))
