"""Gradient norms, clipping and loss scales are those of one process on the whole batch, under every strategy."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Partial, Shard

from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.shards import local_of
from fsdp_compile.optim.flat_step import flat_step
from fsdp_compile.optim.gradients import GradScaler, clip_grad_norm_
from tests import long
from tests.fsdp2.models import mesh_of
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import whole

WIDTH = 6


class Net(nn.Module):
    """One row of `row` and a 0-d `scale`: some ranks have nothing of the one, all have the other whole."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, 7)
        self.two = nn.Linear(7, WIDTH)
        self.row = nn.Parameter(torch.randn(1, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).relu()) * self.scale + self.row


def full_shard(model: nn.Module) -> None:
    fully_shard(model, ignored_params=_ignored(model))


def hybrid(model: nn.Module) -> None:
    fully_shard(model, mesh=mesh_of((2, 2)), ignored_params=_ignored(model))


def two_meshes(model: nn.Module) -> None:
    assert isinstance(model, Net)
    fully_shard(model.one, mesh=mesh_of((2, 2)))
    fully_shard(model, mesh=mesh_of((4,)), ignored_params=_ignored(model))


def _ignored(model: nn.Module) -> set[nn.Parameter]:
    """FSDP2 does not shard 0-d parameters."""
    return {parameter for parameter in model.parameters() if parameter.dim() == 0}


def _trained(prepare: Callable[[nn.Module], None]) -> tuple[nn.Module, nn.Module]:
    """A sharded model and its copy in one process, after backward over the same batch."""
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    prepare(model)
    batch = torch.randn(8, WIDTH)
    mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
    for net, rows in ((model, mine), (reference, batch)):
        (net(rows) - rows).square().mean().backward()
    for parameter in _ignored(model):
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
    return model, reference


LAYOUTS = [(full_shard, 1), (full_shard, 2), (full_shard, 4), (hybrid, 4), (two_meshes, 4)]


@pytest.mark.core
@long.parametrize(("prepare", "ranks"), LAYOUTS, always=[*LAYOUTS[:2], LAYOUTS[-1]])
@on_ranks(world_size=lambda ranks, **_: ranks)
def test_ranks_clip_like_one_process(prepare: Callable[[nn.Module], None], ranks: int) -> None:
    model, reference = _trained(prepare)
    pairs = [(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True) if q.grad is not None]
    kept: list[Any] = [(p.grad.clone(), q.grad.clone()) for p, q in pairs]  # type: ignore[union-attr]
    for norm_type in (2.0, 1.0, 3.0, math.inf):
        for (p, q), (mine, theirs) in zip(pairs, kept, strict=True):
            p.grad, q.grad = mine.clone(), theirs.clone()
        norm = clip_grad_norm_(model, 0.1, norm_type)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
        assert type(norm) is torch.Tensor
        assert norm.dim() == 0
        torch.testing.assert_close(norm, expected)
        for p, q in pairs:
            torch.testing.assert_close(whole(p.grad), q.grad)
    assert model.unused.grad is None


@on_ranks()
def test_gradients_below_the_norm_keep_their_bits() -> None:
    model, _ = _trained(full_shard)
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = clip_grad_norm_(model, 1e6)
    assert 0 < norm < 1e6
    for name, gradient in before.items():
        clipped = model.get_parameter(name).grad
        assert clipped is not None
        assert torch.equal(local_of(clipped), local_of(gradient)), name


@pytest.mark.core
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@on_ranks()
def test_plain_gradients_count_once_as_each_rank_has_them(norm_type: float) -> None:
    torch.manual_seed(0)
    model = Net()
    model.row = nn.Parameter(model.row.detach().double())
    fully_shard(model, ignored_params={model.row, model.scale})
    sharded = torch.arange(7.0 * WIDTH).view(7, WIDTH)
    mesh = mesh_of((2,))
    rows = sharded.chunk(2)[dist.get_rank()]
    model.one.weight.grad = DTensor.from_local(rows, mesh, [Shard(0)], shape=sharded.shape, stride=sharded.stride())
    model.row.grad = torch.full((1, WIDTH), 10.0 * (1 + dist.get_rank()), dtype=torch.float64)
    model.scale.grad = torch.tensor(3.0)
    full = torch.cat([sharded.flatten().double(), model.row.grad.flatten(), torch.tensor([3.0], dtype=torch.float64)])
    expected = torch.linalg.vector_norm(full, norm_type).item()
    before = model.row.grad[0, 0].item()
    norm = clip_grad_norm_([*model.parameters(), model.row], 1.0, norm_type)  # `row` is there twice
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    assert model.row.grad[0, 0].item() / before * expected == pytest.approx(1.0, rel=1e-5)
    assert norm.dtype is torch.float64


@on_ranks(world_size=4)
def test_one_reduction_per_group_and_no_look_from_the_host() -> None:
    model, _ = _trained(two_meshes)
    with (
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced,
        mock.patch.object(torch.Tensor, "item", side_effect=AssertionError("the host waits for the device")),
        mock.patch.object(torch.Tensor, "__bool__", side_effect=AssertionError("the host waits for the device")),
    ):
        clip_grad_norm_(model.parameters(), 1.0)
    assert (reduced.call_count, [call.args[0].numel() for call in reduced.call_args_list]) == (2, [1, 1])


def _reductions_of(prepare: Callable[[nn.Module], None]) -> int:
    model, _ = _trained(prepare)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
        clip_grad_norm_(model.parameters(), 1.0)
    return reduced.call_count


def test_what_every_rank_has_whole_needs_no_collective() -> None:
    assert run_ranks(_reductions_of, full_shard, world_size=1) == [0]
    assert run_ranks(_reductions_of, full_shard, world_size=2) == [1, 1]


@on_ranks(timeout_s=60)
def test_a_rank_without_gradients_joins() -> None:
    model = nn.Linear(WIDTH, 4, bias=False)
    fully_shard(model)
    if dist.get_rank() == 1:
        model.weight.grad = torch.zeros_like(model.weight)
        local_of(model.weight.grad).fill_(2.0)
    assert clip_grad_norm_(model, 100.0).item() == pytest.approx(math.sqrt(2 * WIDTH * 4))
    assert clip_grad_norm_(model, 100.0, math.inf).item() == pytest.approx(2.0)


@long.parametrize(
    ("value", "norm_type"),
    [(math.nan, math.inf), (math.inf, 2.0), (math.nan, 2.0)],
    always=[(math.nan, math.inf)],
)
@on_ranks()
def test_all_ranks_see_a_norm_that_is_not_finite(value: float, norm_type: float) -> None:
    model = nn.Linear(WIDTH, 4, bias=False)
    fully_shard(model)
    model.weight.grad = torch.zeros_like(model.weight)
    if dist.get_rank() == 0:
        local_of(model.weight.grad)[0, 0] = value
    norm = clip_grad_norm_(model, 1.0, norm_type)
    local_of(model.weight.grad).fill_(value)
    with pytest.raises(RuntimeError, match="nothing was clipped") as caught:
        clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
    assert not norm.isfinite()
    assert str(value) in str(caught.value)


def test_sums_of_half_precision_gradients_are_made_in_float32() -> None:
    gradient = torch.full((3000,), 30.0, dtype=torch.float16)  # the sum of squares, and that of norms, overflow float16
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = gradient.clone()
    norm = clip_grad_norm_(parameters, 1.0)
    assert norm.dtype is torch.float16
    assert norm.item() == pytest.approx(30 * math.sqrt(9000), rel=1e-3)
    assert parameters[0].grad is not None
    assert parameters[0].grad[0].item() == pytest.approx(1 / math.sqrt(9000), rel=2e-3)


def test_no_gradients_have_norm_zero() -> None:
    norm = clip_grad_norm_(nn.Linear(2, 2), 1.0)
    assert (norm.item(), norm.dtype) == (0.0, torch.float32)


@pytest.mark.parametrize("norm_type", [0.0, -1.0, math.nan])
def test_an_order_that_makes_no_norm_is_refused(norm_type: float) -> None:
    with pytest.raises(ConfigError, match="a positive number"):
        clip_grad_norm_(nn.Linear(2, 2), 1.0, norm_type)


@on_ranks()
def test_a_sum_that_was_not_made_yet_is_refused() -> None:
    parameter = nn.Parameter(DTensor.from_local(torch.ones(2), mesh_of((2,)), [Partial()]))
    with pytest.raises(ConfigError, match="redistribute"):
        clip_grad_norm_(parameter, 1.0)


def test_norms_of_half_precision_gradients_are_not_rounded_before_they_are_summed() -> None:
    parameters = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(64)]
    for parameter in parameters:
        parameter.grad = torch.tensor([1.0, 2**-4], dtype=torch.bfloat16)  # its norm would be rounded to 1
    wide = nn.Parameter(torch.zeros(2))
    wide.grad = torch.zeros(2)
    norm = clip_grad_norm_([*parameters, wide], 1.0)
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(8 * math.sqrt(1 + 2**-8), rel=1e-5)


SCALE = 64.0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.own = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) * self.own


def _check_skipping(scaler_class: Any, infinite: str, ignored: tuple[str, ...]) -> None:
    """Two steps: one in which rank 1 alone has an infinite gradient, and one in which nobody has."""
    model = Scaled()
    fully_shard(model, ignored_params={model.get_parameter(name) for name in ignored})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = scaler_class("cpu", init_scale=SCALE)
    for step, expected in enumerate((torch.eye(4), torch.eye(4) - 1.0)):
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        if step == 0 and dist.get_rank() == 1:
            local_of(model.get_parameter(infinite).grad).view(-1)[0] = float("inf")  # type: ignore[arg-type]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        torch.testing.assert_close(whole(model.weight).detach(), expected)
        assert scaler.get_scale() == SCALE / 2


@pytest.mark.core
@long.parametrize("scaler_class", [torch.amp.GradScaler, ShardedGradScaler, GradScaler], always=[GradScaler])
@on_ranks()
def test_ranks_skip_together_where_all_parameters_are_sharded(scaler_class: Any) -> None:
    _check_skipping(scaler_class, "weight", ())


@pytest.mark.core
@long.parametrize("infinite", ["weight", "own"], always=["own"])
@on_ranks()
def test_ranks_skip_together_with_ignored_parameters(infinite: str) -> None:
    _check_skipping(GradScaler, infinite, ("own",))


@on_ranks()
def test_clipping_after_unscaling_sees_the_true_norm() -> None:
    model = Scaled()
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


@on_ranks()
def test_flat_step_after_unscaling_and_clipping_is_the_plain_step() -> None:
    """Steps with `flat_step` and steps without; in the second one, rank 1 has an infinite gradient."""
    ends = []
    for wrap in (flat_step, lambda optimizer: optimizer):
        torch.manual_seed(0)
        model = Net()
        full_shard(model)
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1))
        scaler = GradScaler("cpu", init_scale=SCALE)
        norms, scales = [], []
        for step in range(4):
            batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            scaler.scale(model(batch).square().sum()).backward()
            dist.all_reduce(model.scale.grad, dist.ReduceOp.AVG)  # ignored parameters are averaged by their owner
            if step == 1 and dist.get_rank() == 1:
                local_of(model.one.weight.grad).view(-1)[0] = float("inf")  # type: ignore[arg-type]
            scaler.unscale_(optimizer)
            norms.append(clip_grad_norm_(model, 0.25).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE / 2]
        assert all(norm > 0.25 for norm in norms), "each step was clipped"
        assert [norm == math.inf for norm in norms] == [False, True, False, False]
        ends.append((norms, [local_of(p) for p in model.parameters()]))
    (flat_norms, flat), (norms, plain) = ends
    assert flat_norms == norms
    assert all(torch.equal(p, q) for p, q in zip(flat, plain, strict=True))


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


@on_ranks()
def test_torchs_own_scaler_refuses_a_mix_which_is_why_there_is_another_one() -> None:
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        _check_skipping(torch.amp.GradScaler, "weight", ("own",))
