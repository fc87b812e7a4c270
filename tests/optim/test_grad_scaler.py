"""An infinite gradient on one rank alone makes all ranks skip the step, and lowers the scale of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

from fsdp_compile.fsdp2.shards import local_of
from fsdp_compile.optim.clip import clip_grad_norm_
from fsdp_compile.optim.flat_step import flat_step
from fsdp_compile.optim.grad_scaler import GradScaler
from tests import long
from tests.ranks import on_ranks, run_ranks

SCALE = 64.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.own = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) * self.own


def _full(parameter: nn.Parameter) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor().detach()


def _train(scaler_class: Any, infinite: str, ignored: tuple[str, ...]) -> tuple[list[Any], list[float]]:
    """Two steps: one in which rank 1 alone has an infinite gradient, and one in which nobody has."""
    model = Net()
    fully_shard(model, ignored_params={model.get_parameter(name) for name in ignored})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = scaler_class("cpu", init_scale=SCALE)
    weights, scales = [], []
    for step in range(2):
        loss = model(torch.ones(1, 4)).sum()
        scaler.scale(loss).backward()
        if step == 0 and dist.get_rank() == 1:
            gradient = model.own.grad if infinite == "own" else model.weight.grad
            assert gradient is not None
            local_of(gradient).view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        weights.append(_full(model.weight).clone())
        scales.append(scaler.get_scale())
    return weights, scales


def _check(outcomes: list[tuple[list[Any], list[float]]]) -> None:
    for weights, scales in outcomes:
        assert torch.equal(weights[0], torch.eye(4)), "the step was not skipped"
        assert torch.allclose(weights[1], torch.eye(4) - 1.0), "the step was not taken, or not unscaled"
        assert scales == [SCALE / 2, SCALE / 2]


@pytest.mark.core
@long.parametrize(
    "scaler_class",
    [torch.amp.GradScaler, ShardedGradScaler, GradScaler],
    always=[torch.amp.GradScaler, GradScaler],
)
def test_ranks_skip_together_where_all_parameters_are_sharded(scaler_class: Any) -> None:
    _check(run_ranks(_train, scaler_class, "weight", (), world_size=2))


@pytest.mark.core
@pytest.mark.parametrize("infinite", ["weight", "own"])
def test_ranks_skip_together_with_ignored_parameters(infinite: str) -> None:
    _check(run_ranks(_train, GradScaler, infinite, ("own",), world_size=2))


@on_ranks()
def test_clipping_after_unscaling_sees_the_true_norm() -> None:
    """Unscaling by hand before clipping, with nothing infinite."""
    model = Net()
    fully_shard(model, ignored_params={model.own})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=SCALE)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model, 1e9).item()
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    assert norm == pytest.approx((16 + 4) ** 0.5)  # of sixteen ones in `weight` and four in `own`
    assert scaler.get_scale() == SCALE
    assert [v.item() for v in found.values()] == [0.0]


class Chain(nn.Module):
    """Two layers whose rows do not divide over two ranks, and a parameter that every rank holds whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.own = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.own


@on_ranks()
def test_flat_step_after_unscaling_and_clipping_is_the_plain_step() -> None:
    """Steps with `flat_step` beside steps without: the clipped norm, the scale, and whether all bits are equal."""
    sides = []
    for wrap in (flat_step, lambda optimizer: optimizer):
        model = Chain()
        fully_shard(model, ignored_params={model.own})
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1))
        sides.append((model, optimizer, GradScaler("cpu", init_scale=SCALE)))
    steps = [_flat_and_plain_step(sides, step) for step in range(4)]
    assert [same for _, _, same in steps] == [True] * 4
    assert [scale for _, scale, _ in steps] == [SCALE, SCALE / 2, SCALE / 2, SCALE / 2]
    assert [norm > 0.25 for norm, _, _ in steps] == [True] * 4, "each step was clipped"
    assert [norm == float("inf") for norm, _, _ in steps] == [False, True, False, False]


def _flat_and_plain_step(sides: list[Any], step: int) -> tuple[float, float, bool]:
    norms, scales = [], []
    for model, optimizer, scaler in sides:
        batch = torch.randn(2, 4, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        scaler.scale(model(batch).square().sum()).backward()
        dist.all_reduce(model.own.grad, dist.ReduceOp.AVG)  # ignored parameters are averaged by their owner
        if step == 1 and dist.get_rank() == 1:
            local_of(model.layers[0].weight.grad).view(-1)[0] = float("inf")
        scaler.unscale_(optimizer)
        norms.append(clip_grad_norm_(model, 0.25).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    flat, plain = (model.parameters() for model, *_ in sides)
    same = all(torch.equal(local_of(p), local_of(q)) for p, q in zip(flat, plain, strict=True))
    assert scales[0] == scales[1]
    assert norms[0] == norms[1]
    return norms[0], scales[0], same


def test_half_precision_gradients_are_refused_by_name() -> None:
    scaler = GradScaler("cpu", init_scale=SCALE)
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler.scale(parameter.sum().float()).backward()
    with pytest.raises(ValueError, match="keep parameters in float32"):
        scaler.unscale_(torch.optim.SGD([parameter], lr=1.0))


def test_without_a_process_group_it_is_torchs_own() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=SCALE)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(parameter.detach(), torch.zeros(2))


def _torchs_own() -> str:
    with pytest.raises(RuntimeError) as caught:
        _train(torch.amp.GradScaler, "weight", ("own",))
    return str(caught.value)


def test_torchs_own_scaler_refuses_a_mix_which_is_why_there_is_another_one() -> None:
    assert all("mixed torch.Tensor and DTensor" in message for message in run_ranks(_torchs_own))
