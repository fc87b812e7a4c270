"""Complex parameters: stored, sent and averaged as pairs of real numbers, and complex wherever somebody sees them."""

from __future__ import annotations

import copy
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import fsdp_compile
from fsdp_compile import EMA, UnsupportedModelError, flat_step, full_params, fully_shard, no_sync
from tests import long
from tests.beside import Beside, Run, close, compile_eagerly, loss_of
from tests.ranks import run_ranks

HOW: Final = long.parametrize(
    "how", [Run.PLAIN, Run.SHARDED, Run.EAGER], always=[Run.PLAIN, Run.EAGER], ids=lambda how: how.value
)


class Rotations(nn.Module):
    """Real and complex parameters of several shapes, a tied one among them. Input: `[rows, 6]`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5, dtype=torch.complex64)
        self.phase = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.number = nn.Parameter(torch.tensor(0.5 - 0.25j))
        self.frozen = nn.Parameter(torch.randn(5, 7, dtype=torch.complex64).t().contiguous().t(), requires_grad=False)
        self.down = nn.Linear(7, 6)
        self.again = nn.Linear(6, 5, dtype=torch.complex64)
        self.again.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.up(x.to(torch.complex64)) @ self.frozen * self.phase
        return self.down(z.real) * self.number.abs() + self.again(x.to(torch.complex64)).imag.sum(1, keepdim=True)


def _trained(how: Run) -> None:
    pair = Beside(Rotations, how)
    pair.optimize(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    for _ in range(3):
        pair.step()


@HOW
def test_training_equals_one_process(how: Run) -> None:
    run_ranks(_trained, how)


@pytest.mark.long
def test_training_on_other_numbers_of_ranks() -> None:
    for world_size in (1, 3):
        run_ranks(_trained, Run.PLAIN, world_size=world_size)


def _as_fsdp2() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, dtype=torch.complex64)
    mine, theirs = nn.Sequential(layer), nn.Sequential(copy.deepcopy(layer))
    fully_shard(mine)
    torch_fully_shard(theirs)
    x = torch.randn(2, 6, dtype=torch.complex64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for model in (mine, theirs):
        model(x).abs().square().mean().backward()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert isinstance(a, DTensor)
        assert isinstance(b, DTensor)
        assert (a.dtype, a.shape, a.placements) == (b.dtype, b.shape, b.placements)
        assert torch.equal(a.full_tensor(), b.full_tensor())
        assert torch.equal(a.grad.full_tensor(), b.grad.full_tensor())  # type: ignore[union-attr]


def test_parameters_and_gradients_have_the_bits_of_fsdp2() -> None:
    run_ranks(_as_fsdp2)


def _clipped() -> None:
    pair = Beside(Rotations, Run.PLAIN)
    pair.backward()
    for order in (2.0, 1.0, float("inf")):
        mine = fsdp_compile.clip_grad_norm_(pair.model, 0.1, order)
        theirs = nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.1, order)
        torch.testing.assert_close(mine, theirs)
    pair.compare()


def test_norms_are_those_of_complex_numbers() -> None:
    run_ranks(_clipped)


def _held() -> None:
    pair = Beside(Rotations, Run.PLAIN)
    pair.compiled(torch.ones(2, 6))
    pair.optimize(lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-3))
    flat_step(pair.optimizers[0][0])
    generator = torch.Generator().manual_seed(3)
    batch = torch.randn(2 * dist.get_world_size(), 6, generator=generator)
    with no_sync(pair.model):
        loss_of(pair.compiled(batch.chunk(dist.get_world_size())[dist.get_rank()])).backward()
    loss_of(pair.reference(batch)).backward()
    average = EMA(pair.model, 0.5)
    average.update()
    first = {name: p.detach().clone() for name, p in pair.reference.named_parameters()}
    pair.step()
    pair.step()
    average.update()
    with average.swapped_in():
        for name, parameter in pair.model.named_parameters():
            now = pair.reference.get_parameter(name)
            assert isinstance(parameter, DTensor)
            close(parameter.full_tensor(), (first[name] + now) / 2, name)


def test_held_gradients_flat_steps_and_averages() -> None:
    run_ranks(_held)


def _stored() -> None:
    pair = Beside(Rotations, Run.PLAIN)
    pair.step()
    with full_params(pair.model):
        for name, parameter in pair.model.named_parameters():
            assert not isinstance(parameter, DTensor)
            close(parameter, pair.reference.get_parameter(name), name)
        with torch.no_grad():
            pair.model.phase.mul_(2j)  # type: ignore[operator]
    with torch.no_grad():
        pair.reference.phase.mul_(2j)  # type: ignore[operator]
    pair.change(lambda model: model.zero_grad())
    pair.step()
    state = dict(fsdp_compile.full_tensors(pair.model))
    for name, value in pair.reference.state_dict().items():
        close(state[name], value, name)
    fsdp_compile.load_from_rank0(pair.model, pair.reference.state_dict() if dist.get_rank() == 0 else None)
    pair.change(lambda model: model.zero_grad())
    pair.step()


def test_full_values_go_out_and_come_in() -> None:
    run_ranks(_stored)


def _optimizer_state() -> None:
    pair = Beside(Rotations, Run.PLAIN)
    pair.compiled(torch.ones(2, 6))
    pair.optimize(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    pair.step()
    mine, theirs = pair.optimizers[0]
    saved = fsdp_compile.optim_state_dict(pair.model, mine)
    for name, parameter in pair.reference.named_parameters():
        if parameter in theirs.state:
            close(saved["state"][name]["momentum_buffer"], theirs.state[parameter]["momentum_buffer"], name)
    mine.state.clear()
    mine.load_state_dict(fsdp_compile.optim_state_dict_to_load(pair.model, mine, saved))
    pair.step()


def test_the_state_of_an_optimizer_goes_out_and_comes_in() -> None:
    run_ranks(_optimizer_state)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(5, 3, dtype=torch.complex64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.w.copy_(torch.view_as_complex(torch.randn(5, 3, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.w.T).abs()


def _from_meta() -> None:
    torch.manual_seed(0)
    expected = _Layer()
    with torch.device("meta"):
        model = _Layer()
    torch.manual_seed(0)
    fsdp_compile.materialize(fully_shard(model))
    assert torch.equal(model.w.full_tensor(), expected.w)  # type: ignore[attr-defined]
    assert torch.equal(model(torch.ones(2, 3)), expected(torch.ones(2, 3)))


def test_values_are_made_from_meta() -> None:
    run_ranks(_from_meta)


def _changed() -> None:
    pair = Beside(Rotations, Run.PLAIN)
    pair.step()
    pair.change(lambda model: model.zero_grad())
    pair.change(lambda model: model.frozen.requires_grad_())
    pair.step()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = fully_shard(nn.Linear(6, 4, dtype=torch.complex64), mp_policy=policy)
    assert model(torch.ones(2, 6, dtype=torch.complex64)).dtype is torch.complex64


def test_layouts_change_and_mixed_precision_leaves_them_alone() -> None:
    run_ranks(_changed)


class _Asks(Rotations):
    """Computes with what it finds out about its parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answers = 1 + isinstance(self.phase, nn.Parameter) + 2 * (self.phase is self.phase)
        answers += 4 * (self.up.weight is self.again.weight) + 8 * (self.up.bias is self.again.bias)
        return super().forward(x) * answers


def _asked(how: Run) -> None:
    pair = Beside(_Asks, how)
    pair.step()


@HOW
def test_questions_are_answered_as_in_one_process(how: Run) -> None:
    run_ranks(_asked, how)


class _Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.w.mul_(2)
        return x * self.w.abs()


def _writes() -> None:
    for call in (fully_shard(_Written()), compile_eagerly(_Written())):
        with pytest.raises(
            (UnsupportedModelError, BackendCompilerFailed), match="changes a gathered parameter in place"
        ):
            call(torch.ones(2, 4))


def test_writes_into_gathered_ones_are_refused() -> None:
    run_ranks(_writes)
