"""Without a compiler every read gathers by itself: the same results, and DTensors wherever no forward runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_compile.modules.eager_reads import GatheredParameter
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile import UnsupportedModelError, fully_shard
from tests import long
from tests.beside import Beside, Run, close, compile_eagerly, loss_of
from tests.models.outlines import WIDTH, Block, Odd, Small, Transformer
from tests.ranks import run_ranks


def _check_training() -> None:
    for make, width, dtype in ((Odd, 10, torch.float64), (Small, 6, torch.float32)):
        pair = Beside(make, Run.EAGER)
        pair.optimize(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        for _ in range(3):
            pair.step(width=width)
        assert loss_of(pair.model(torch.ones(2, width))).dtype == dtype


@pytest.mark.core
@long.parametrize("world_size", [1, 2, 4], always=[1, 2])
def test_training_without_a_compiler(world_size: int) -> None:
    run_ranks(_check_training, world_size=world_size)


def _check_no_grad() -> None:
    torch.manual_seed(0)
    model = Transformer()
    reference = copy.deepcopy(model)
    fully_shard(model)
    tokens = torch.arange(8).reshape(2, 4)
    with torch.no_grad():
        assert torch.equal(model(tokens), reference(tokens))
    with torch.inference_mode():
        assert torch.equal(model(tokens), reference(tokens))
    model.eval()
    output = model(tokens)
    assert output.requires_grad
    assert torch.equal(output, reference(tokens))


def test_inference() -> None:
    run_ranks(_check_no_grad)


class _Averaged(nn.Module):
    """Reads what `parameters()` gives, and updates a moving average of it when it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.average = nn.Linear(5, 5).requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for mean, value in zip(self.average.parameters(), self.layer.parameters(), strict=True):
                    mean.lerp_(value, 0.5)
        return self.layer(x) + self.average(x) * sum(p.square().sum() for p in self.layer.parameters())


def _check_parameters_without_gradients() -> None:
    torch.manual_seed(0)
    model = _Averaged()
    reference = copy.deepcopy(model)
    fully_shard(model.layer)
    fully_shard(model)
    x = torch.randn(2, 5)
    for made in (model, reference):
        made(x)  # a moving average, updated in a forward that has gradients
        made.eval()
    average = model.average.weight
    assert isinstance(average, DTensor)
    torch.testing.assert_close(average.full_tensor(), reference.average.weight)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            torch.testing.assert_close(model(x), reference(x))


def test_parameters_are_full_in_an_evaluation_and_stored_where_a_forward_turns_gradients_off() -> None:
    run_ranks(_check_parameters_without_gradients)


def _check_average_while_kept() -> None:
    torch.manual_seed(0)
    model = _Averaged()
    reference = copy.deepcopy(model)
    fully_shard(model)
    model.set_reshard_after_backward(False)  # type: ignore[operator]
    for _ in range(3):
        x = torch.randn(2, 5)
        outputs = [made(x) for made in (model, reference)]
        torch.testing.assert_close(*outputs)
        for output in outputs:
            output.sum().backward()


def test_a_read_sees_what_the_same_forward_has_written_while_parameters_stay_unsharded() -> None:
    run_ranks(_check_average_while_kept)


class _Methods(nn.Module):
    """Looks at its parameters inside and outside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.own = nn.Parameter(torch.ones(6))
        self.seen: list[type] = []

    def look(self) -> None:
        self.seen = [type(self.own), type(self.layer.weight), type(next(self.parameters()))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look()
        return F.linear(x, self.layer.weight) * self.own


def _check_methods() -> None:
    torch.manual_seed(0)
    model = _Methods()
    reference = copy.deepcopy(model)
    fully_shard(model)
    model.look()
    assert model.seen == [DTensor, DTensor, DTensor]
    x = torch.randn(2, 4)
    torch.testing.assert_close(model(x), reference(x))
    assert model.seen == [GatheredParameter] * 3, "gathered inside of forward, also for its caller"
    assert all(issubclass(kind, nn.Parameter) for kind in model.seen)
    model.look()
    assert model.seen == [DTensor, DTensor, DTensor]
    with pytest.raises(ValueError, match="on purpose"):
        model(_FailsAsInput())
    model.look()
    assert model.seen == [DTensor, DTensor, DTensor], "after a forward that raised"


class _FailsAsInput:
    @classmethod
    def __torch_function__(cls, *_args: Any, **_kwargs: Any) -> Any:
        raise ValueError("on purpose")


def test_methods_see_gathered_values_inside_of_forward_and_dtensors_outside() -> None:
    run_ranks(_check_methods)


class _Scaled(nn.Sequential):
    """A Sequential with a forward of its own, which reads a parameter of its first child."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self[0]
        assert isinstance(first, nn.Linear)
        return super().forward(x) * first.weight.mean()


def _scaled() -> nn.Module:
    return _Scaled(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


class _Recurrent(nn.Module):
    """An LSTM keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x[:, None])[0][:, 0])


class _Attends(nn.Module):
    """Attention reads the weights of its output projection itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x[:, None], x[:, None], x[:, None])[0]


def _check_readers() -> None:
    for make in (_scaled, _Recurrent, _Attends):
        pair = Beside(make, Run.EAGER)
        pair.optimize(lambda p: torch.optim.SGD(p, lr=0.1))
        pair.step()
        pair.step()


def test_modules_that_read_parameters_in_ways_of_their_own() -> None:
    run_ranks(_check_readers)


class _PartlyEager(nn.Module):
    """Its middle is not compiled, and reads a parameter of another module too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(6, WIDTH), Block(), nn.Linear(WIDTH, 2)

    @torch._dynamo.disable
    def uncompiled(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(x) * self.head.weight.mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.uncompiled(self.first(x)))


def _check_partly_eager() -> None:
    pair = Beside(_PartlyEager, Run.SHARDED)
    pair.optimize(lambda p: torch.optim.AdamW(p, lr=1e-2))
    pair.step()
    pair.step()


@pytest.mark.long
def test_an_uncompiled_part_of_a_compiled_model() -> None:
    run_ranks(_check_partly_eager)


def _check_accumulation() -> None:
    """A parameter read twice, and two backwards before a step; a part that got no gradient keeps None."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(6, 6), "unused": nn.Linear(6, 6)})
    reference = copy.deepcopy(model)
    for part in model.values():
        fully_shard(part)
    batch = torch.randn(4 * dist.get_world_size(), 6)
    for x in (batch, batch.flip(0)):
        mine = x.chunk(dist.get_world_size())[dist.get_rank()]
        loss_of(model["used"](model["used"](mine))).backward()
        loss_of(reference["used"](reference["used"](x))).backward()
    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(name).grad
        if expected is None:
            assert parameter.grad is None
        else:
            assert isinstance(parameter.grad, DTensor)
            close(parameter.grad.full_tensor(), expected, name)


def test_gradients_accumulate() -> None:
    run_ranks(_check_accumulation)


def _check_mixed_precision() -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32, cast_forward_inputs=True
    )
    torch.manual_seed(0)
    model = Small()
    reference = copy.deepcopy(model).bfloat16()
    fully_shard(model, mp_policy=policy)
    x = torch.randn(4, 6)
    output = model(x)
    assert output.dtype == torch.float32
    assert torch.equal(output, reference(x.bfloat16()).float())
    output.square().mean().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    reference(x.bfloat16()).float().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        expected = reference.get_parameter(name).grad
        assert expected is not None
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.float(), rtol=2e-2, atol=1e-3)


def test_mixed_precision_casts_parameters_inputs_and_outputs() -> None:
    run_ranks(_check_mixed_precision)


class _ScaledInAList(Small):
    """Scales a parameter by what counts no write, through a view of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch._foreach_mul_([self.up.weight.data], 0.5)
        return super().forward(x)


class _Teacher(Small):
    """Averages its own layer in a part that returns before anything else is read."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 7).requires_grad_(requires_grad=False)

    @torch.no_grad()
    def average(self) -> None:
        torch._foreach_lerp_([self.teacher.weight, self.teacher.bias], [self.up.weight, self.up.bias], 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average()
        return self.scale * (self.up(x) - self.teacher(x))


class _Dropped(nn.Linear):
    """Writes into a parameter, then returns: nothing refers to it any more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        with torch.no_grad():
            weight.mul_(0.5)
        return x + bias


class _Lists(Small):
    """Writes into a list of tensors that has no parameter, and keeps what it reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [self.up.weight * 1, self.up.bias * 1]
        torch._foreach_mul_(values, 2.0)
        return F.linear(x, *values).sum(1, keepdim=True) + super().forward(x)


def _check_lost_writes() -> None:
    for make in (_ScaledInAList, _Teacher):
        pair = Beside(make, Run.EAGER)
        before = [p.to_local().clone() for p in pair.model.parameters()]  # type: ignore[attr-defined]
        for training in (True, False):
            pair.model.train(training)
            with pytest.raises(UnsupportedModelError, match=r"(?s)changes a gathered parameter in place.*weight of L"):
                pair.model(torch.ones(2, 6))
        after = [p.to_local() for p in pair.model.parameters()]  # type: ignore[attr-defined]
        assert all(map(torch.equal, before, after))
    model = fully_shard(nn.Sequential(_Dropped(6, 6), nn.Linear(6, 2)))
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(UnsupportedModelError, match=r"(?s)changes a gathered parameter in place.*weight of _Dr"),
        ):
            model(torch.ones(2, 6))
    pair = Beside(_Lists, Run.EAGER)
    for _ in range(2):
        pair.backward()
    pair.compare()


def test_writes_into_lists_of_parameters_and_into_what_is_dropped_are_refused_by_name() -> None:
    run_ranks(_check_lost_writes)


def _check_gradient_penalty() -> None:
    """The gradient of the loss with respect to the input is part of the loss, as WGAN-GP does it."""
    torch.manual_seed(0)
    model = Small()
    reference = copy.deepcopy(model)
    fully_shard(model)
    for each in (model, reference):
        x = torch.linspace(-1, 1, 12).reshape(2, 6).requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(each(x)), x, create_graph=True)
        gradient.square().sum().backward()
    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(name).grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            assert isinstance(parameter.grad, DTensor)
            close(parameter.grad.full_tensor(), expected, name)


def test_a_gradient_penalty_with_respect_to_the_input() -> None:
    run_ranks(_check_gradient_penalty)


def _check_refusals() -> None:
    model = Small()
    fully_shard(model)
    for call in (model, compile_eagerly(model)):
        with pytest.raises(UnsupportedModelError, match="double backward") as caught:
            loss_of(call(torch.ones(2, 6))).backward(create_graph=True)
        assert "create_graph=True" in str(caught.value)
    with pytest.raises(UnsupportedModelError, match="deep-copied") as refused:
        copy.deepcopy(model)
    assert "copy.deepcopy(model) before" in str(refused.value)
    with pytest.raises(UnsupportedModelError, match="deep-copied"):
        copy.deepcopy(nn.Sequential(model))


def test_gradients_of_parameter_gradients_and_deep_copies_are_refused() -> None:
    run_ranks(_check_refusals)


def _check_compiled_double_backward() -> None:
    model = Small()
    compiled = compile_eagerly(model)
    x = torch.ones(2, 6, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss_of(compiled(x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.square().sum().backward()


def test_a_compiled_double_backward_is_refused() -> None:
    run_ranks(_check_compiled_double_backward)
