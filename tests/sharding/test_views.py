"""What users do to parameters between steps: it is noticed and the new values are used, or it is refused by name.

Every change is done to a sharded model and to a copy of it in one process; both are then trained on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fsdp_compile import ConfigError, UnsupportedModelError, full_params, fully_shard, no_sync, units
from tests import long
from tests.beside import Beside, Run, compile_eagerly
from tests.fake_world import fake_world
from tests.models.outlines import Odd, Small, Transformer
from tests.ranks import run_ranks

Change = Callable[[Any], None]


def _name(change: Change) -> str:
    return change.__name__.strip("_")


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-1, momentum=0.9, weight_decay=0.1)


def _new_value(parameter: torch.Tensor) -> torch.Tensor:
    """The same full value on every rank."""
    return torch.linspace(-1.0, 1.0, max(parameter.numel(), 1))[: parameter.numel()].reshape(parameter.shape)


def _double(model: Any) -> None:
    model.to(torch.float64)


def _replace_one(model: Any) -> None:
    model.up.weight = nn.Parameter(_new_value(model.up.weight))


def _replace_number(model: Any) -> None:
    model.scale = nn.Parameter(torch.tensor(-2.0))


def _assign_full(model: Any) -> None:
    model.load_state_dict({name: _new_value(p) for name, p in model.state_dict().items()}, assign=True)


def _assign_alike(model: Any) -> None:
    """Loads DTensors into the sharded model, full tensors into the reference."""

    def value(parameter: torch.Tensor) -> torch.Tensor:
        full = _new_value(parameter)
        if isinstance(parameter, DTensor):
            return distribute_tensor(full, parameter.device_mesh, parameter.placements)
        return full

    model.load_state_dict({name: value(p) for name, p in model.state_dict().items()}, assign=True)


def _freeze_and_thaw(model: Any) -> None:
    model.up.requires_grad_(requires_grad=False)
    model.up.requires_grad_(requires_grad=True)


def _freeze_one(model: Any) -> None:
    model.up.weight.requires_grad_(False)  # noqa: FBT003


def _freeze_all_but_one(model: Any) -> None:
    model.requires_grad_(requires_grad=False)
    model.down.weight.requires_grad_(True)  # noqa: FBT003


def _thaw_all(model: Any) -> None:
    model.requires_grad_(requires_grad=True)


def _widen(model: Any) -> None:
    """A hidden layer of 9 instead of 7."""
    model.up.weight = nn.Parameter(_new_value(torch.empty(9, 6)))
    model.up.bias = nn.Parameter(_new_value(torch.empty(9)))
    model.down.weight = nn.Parameter(_new_value(torch.empty(3, 9)))


def _number_to_vector(model: Any) -> None:
    model.scale = nn.Parameter(torch.tensor([1.0, -1.0, 0.5]))


def _initialize(model: Any) -> None:
    nn.init.constant_(model.up.weight, 0.3)
    nn.init.zeros_(model.up.bias)
    with torch.no_grad():
        model.down.weight.mul_(0.5)
        model.scale.fill_(2.0)


def _write_through_data(model: Any) -> None:
    model.up.weight.data.mul_(0.5)
    model.scale.data.fill_(-1.0)


def _delete_and_set(model: Any) -> None:
    value = _new_value(model.up.bias)
    del model.up.bias
    assert not hasattr(model.up, "bias")
    model.up.bias = nn.Parameter(value)


def _tie(model: Any) -> None:
    model.head.weight = model.embed.weight


def _untie(model: Any) -> None:
    model.head.weight = nn.Parameter(_new_value(model.head.weight))


KEEPING: list[Change] = [
    _freeze_and_thaw,
    _freeze_one,
    _freeze_all_but_one,
    _initialize,
    _write_through_data,
]
"""Changes after which the parameters are the same objects, so that the optimizer goes on with them."""
REPLACING: list[Change] = [
    _replace_one,
    _replace_number,
    _assign_full,
    _assign_alike,
    _widen,
    _number_to_vector,
    _delete_and_set,
]
"""Changes after which an optimizer holds parameters that the model no longer has, in one process as here."""


def _check_keeping(names: list[str], how: Run) -> None:
    for name in names:
        pair = Beside(Small, how)
        pair.optimize(_momentum)
        pair.step()
        pair.change(globals()[name])
        pair.step()
        pair.change(_thaw_all)
        pair.step()


def _check_replacing(names: list[str], how: Run, *, keep_optimizer: bool) -> None:
    for name in names:
        pair = Beside(Small, how)
        pair.optimize(_momentum)
        pair.step()
        pair.change(globals()[name])
        if not keep_optimizer:
            pair.optimizers.clear()
        pair.optimize(_momentum)
        pair.step()
        pair.step()


@long.parametrize("change", KEEPING, always=[_freeze_one, _write_through_data], ids=_name)
def test_the_optimizer_goes_on_after(change: Change) -> None:
    run_ranks(_check_keeping, [change.__name__], Run.EAGER)


@long.parametrize("change", REPLACING, always=[_assign_alike, _widen], ids=_name)
def test_a_new_optimizer_trains_the_new_parameters_after(change: Change) -> None:
    run_ranks(_check_replacing, [change.__name__], Run.EAGER, keep_optimizer=False)


@pytest.mark.core
@long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.SHARDED])
@long.parametrize(
    "change",
    [_freeze_one, _initialize, _replace_one, _assign_alike, _widen],
    always=[_initialize, _assign_alike, _widen],
    ids=_name,
)
def test_compiled_code_sees_changes(change: Change, how: Run) -> None:
    """A graph that was compiled before the change runs on, or is compiled again: never with old values."""
    if change in KEEPING:
        run_ranks(_check_keeping, [change.__name__], how)
    else:
        run_ranks(_check_replacing, [change.__name__], how, keep_optimizer=False)


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def _thaw_first(model: Any) -> None:
    model[0].requires_grad_(True)  # noqa: FBT003


def _replace_in_first(model: Any) -> None:
    model[0].weight = nn.Parameter(_new_value(model[0].weight))
    model[2].bias.requires_grad_(False)  # noqa: FBT003


def _check_sequential(how: Run) -> None:
    pair = Beside(_sequential, how)
    pair.change(lambda model: model[0].requires_grad_(requires_grad=False))  # type: ignore[index]
    for change in (_thaw_first, _replace_in_first):
        pair.optimize(_momentum)
        pair.step()
        pair.optimizers.clear()
        pair.change(change)
    pair.optimize(_momentum)
    pair.step()
    pair.optimizers.clear()
    pair.change(_double)
    pair.step(dtype=torch.float64)


@pytest.mark.long
@pytest.mark.parametrize("how", [Run.PLAIN, Run.SHARDED])
def test_compiled_containers_of_torch_see_changes(how: Run) -> None:
    """Dynamo compiles the call of a plain `nn.Sequential` whole, so it is checked before that."""
    run_ranks(_check_sequential, how, world_size=2)


def _check_function() -> None:
    model = _sequential()
    model[0].requires_grad_(requires_grad=False)  # type: ignore[index]
    fully_shard(model)
    compiled = compile_eagerly(lambda x: model(x) + 1)
    compiled(torch.randn(2, 6))
    _thaw_first(model)
    with pytest.raises(ConfigError, match="cannot notice that in time") as caught:
        compiled(torch.randn(2, 6))
    assert "where: 0.weight" in str(caught.value)


@pytest.mark.long
def test_a_compiled_function_refuses_a_thawed_parameter_by_name() -> None:
    run_ranks(_check_function, world_size=2)


@pytest.mark.long
def test_an_optimizer_of_replaced_parameters_does_not_write_into_their_successors() -> None:
    """Momentum and weight decay move a parameter whose `.grad` is zero and not `None`."""
    run_ranks(_check_replacing, ["_replace_one", "_assign_alike"], Run.EAGER, keep_optimizer=True)
    run_ranks(_check_stale_gradients)


def _check_stale_gradients() -> None:
    pair = Beside(Small, Run.EAGER)
    pair.optimize(_momentum)
    pair.step()
    pair.backward()  # leaves gradients on the parameters that are replaced now
    pair.change(_assign_alike)
    for pair_of_optimizers in pair.optimizers:
        for optimizer in pair_of_optimizers:
            optimizer.zero_grad(set_to_none=False)
    pair.step()


def _check_dtype() -> None:
    pair = Beside(Odd, Run.SHARDED)
    pair.optimize(_momentum)
    pair.step(width=10)
    pair.change(_double)
    pair.optimizers.clear()
    pair.optimize(_adamw)
    pair.step(width=10, dtype=torch.float64)
    assert {flat.flat_param.dtype for unit in units(pair.model) for flat in unit.param_groups} == {torch.float64}
    pair.step(width=10, dtype=torch.float64)


def test_training_goes_on_in_another_dtype() -> None:
    run_ranks(_check_dtype)


def _check_change_between_backward_and_step() -> None:
    """The optimizer steps on parameters that are no views any more; the step must reach the next forward."""
    pair = Beside(Small, Run.SHARDED)
    pair.optimize(_adamw)
    pair.step()
    pair.optimizers.clear()
    pair.backward()
    pair.change(_double)
    pair.optimize(_adamw)
    for optimizer in pair.optimizers[0]:
        optimizer.step()
        optimizer.zero_grad()
    pair.step(dtype=torch.float64)


@pytest.mark.long
@pytest.mark.core
def test_an_optimizer_step_on_broken_views_is_not_lost() -> None:
    run_ranks(_check_change_between_backward_and_step)


class _Tokens(Transformer):
    """A transformer that makes its tokens of floats."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x.abs() * 4).long().clamp(max=10))


def _check_ties() -> None:
    pair = Beside(_Tokens, Run.SHARDED)
    pair.optimize(_momentum)
    pair.step()
    pair.change(_tie)
    pair.step()
    pair.step()
    tied = Beside(_tied_tokens, Run.EAGER)
    tied.optimize(_momentum)
    tied.step()
    tied.change(_untie)
    tied.optimizers.clear()
    tied.optimize(_momentum)
    tied.step()
    tied.step()


def _tied_tokens() -> nn.Module:
    return _Tokens(tied=True)


@pytest.mark.long
def test_parameters_can_be_tied_and_untied_between_steps() -> None:
    run_ranks(_check_ties)


def _check_inside_a_function() -> None:
    """A compiled function that calls the model sees in-place changes, and refuses what its graph cannot hold."""
    pair = Beside(Small, Run.SHARDED)
    model = pair.model

    @compile_eagerly
    def call(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    pair.compiled = call
    pair.optimize(_momentum)
    pair.step()
    pair.change(_replace_one)
    pair.optimizers.clear()
    pair.optimize(_momentum)
    pair.step()
    pair.change(_double)
    with pytest.raises(ConfigError) as caught:
        pair.compiled(torch.zeros(2, 6))
    assert "changed its dtype" in str(caught.value)
    assert "scale" in str(caught.value), "the first one by offset"


def test_changes_under_a_compiled_function() -> None:
    run_ranks(_check_inside_a_function)


def _check_meta() -> None:
    with torch.device("meta"):
        model = Odd()
    # A machine with a GPU would give a model on meta a mesh of GPUs.
    fully_shard(model, mesh=None if not torch.accelerator.is_available() else init_device_mesh("cpu", (2,)))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    with pytest.raises(ConfigError, match="has no value yet") as caught:
        model(torch.zeros(2, 10))
    assert "to_empty" in str(caught.value)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    reference = Odd()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        value = reference.get_parameter(name).detach()
        with torch.no_grad():
            parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements))
    compiled = compile_eagerly(model)
    x = torch.randn(4, 10)
    compiled(x).square().mean().backward()
    reference(x).square().mean().backward()
    for name, parameter in model.named_parameters():
        expected = reference.get_parameter(name).grad
        if expected is not None:
            assert isinstance(parameter.grad, DTensor)
            torch.testing.assert_close(parameter.grad.full_tensor(), expected)


@pytest.mark.core
def test_from_meta_through_to_empty_to_training() -> None:
    run_ranks(_check_meta)


def _remove(model: Any) -> None:
    del model.up.bias


def _set_to_none(model: Any) -> None:
    model.up.bias = None


def _assign_data(model: Any) -> None:
    """Torch lets this pass, and the DTensor goes on holding its old value."""
    bias = model.up.bias
    bias.data = distribute_tensor(torch.ones(7), bias.device_mesh, bias.placements)


def _assign_full_data(model: Any) -> None:
    model.up.bias.data = torch.ones(7)


def _back_to_meta(model: Any) -> None:
    model.up.bias = nn.Parameter(torch.empty(7, device="meta"))


def _other_placement(model: Any) -> None:
    mesh = model.up.bias.device_mesh
    model.up.bias = nn.Parameter(distribute_tensor(torch.ones(7), mesh, [Replicate()]))


def _replace_module(model: Any) -> None:
    model.up = nn.Linear(6, 7)


REFUSED: dict[Change, str] = {
    _remove: "was removed from its module",
    _set_to_none: "was removed from its module",
    _assign_data: "`.data` of a sharded parameter was assigned to",
    _assign_full_data: "`.data` of a sharded parameter was assigned to",
    _back_to_meta: "on the meta device",
    _other_placement: "Replicate()",
    _replace_module: "added to a module after it was sharded",
}


def _check_refusal(names: list[str]) -> list[str]:
    messages = []
    for name in names:
        pair = Beside(Small, Run.SHARDED)
        pair.step()
        globals()[name](pair.model)
        with pytest.raises(Exception, match=r"up\.") as caught:
            pair.compiled(torch.zeros(2, 6))
        cause = getattr(caught.value, "inner_exception", caught.value)
        assert isinstance(cause, ConfigError)
        assert cause.instead
        messages.append(str(cause))
    return messages


@pytest.mark.long
def test_what_cannot_be_used_is_refused_by_name() -> None:
    messages, _ = run_ranks(_check_refusal, [change.__name__ for change in REFUSED])
    for message, (change, expected) in zip(messages, REFUSED.items(), strict=True):
        assert expected in message, change.__name__


class _Scales(nn.Module):
    """Many parameters, in many modules."""

    def __init__(self, count: int = 100) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.each:
            x = x + scale(x)
        return x


def _assign_data_of(layer: Any) -> None:
    weight = layer.weight
    weight.data = distribute_tensor(torch.ones(2, 2), weight.device_mesh, weight.placements)


def _rename(layer: Any) -> None:
    layer._parameters["other"] = layer._parameters.pop("weight")


@pytest.mark.parametrize("change", [_assign_data_of, _rename])
@pytest.mark.parametrize("place", [0, 70, 99])
def test_what_hardly_anybody_does_is_noticed_by_the_next_step(change: Change, place: int) -> None:
    with fake_world(2):
        model = fully_shard(_Scales())
        x = torch.ones(1, 2)
        for _ in range(3):
            model(x)
        change(model.get_submodule(f"each.{place}"))
        with pytest.raises(ConfigError, match=rf"each\.{place}\.weight"):
            model(x)


def _step(model: nn.Module, times: int) -> torch.Tensor:
    for _ in range(times):
        output: torch.Tensor = model(torch.ones(1, 2))
    return output


def test_a_forward_without_gradients_notices_it_too() -> None:
    with fake_world(2):
        model = fully_shard(_Scales())
        with torch.no_grad():
            _step(model, 2)
            _assign_data_of(model.get_submodule("each.99"))
            with pytest.raises(ConfigError, match=r"each\.99\.weight"):
                _step(model, 1)


def _thaw(model: Any) -> None:
    model[0].requires_grad_(requires_grad=True)


def _replace_first(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.full((4, 4), 0.1))


def _keep(model: Any) -> None:
    model.set_reshard_after_backward(False)


def _to_float64_and_back(model: Any) -> None:
    model.double().float()


@pytest.mark.parametrize("run", [Run.EAGER, Run.SHARDED])
@pytest.mark.parametrize("change", [_thaw, _replace_first, _keep, _to_float64_and_back], ids=_name)
def test_training_goes_on_after_an_evaluation_in_inference_mode_that_follows_a_change(change: Change, run: Run) -> None:
    with fake_world(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model[0].requires_grad_(change is not _thaw)
        fully_shard(model)
        call = model if run is Run.EAGER else compile_eagerly(model)
        x = torch.ones(2, 4)
        call(x).sum().backward()
        torch.optim.SGD(model.parameters()).step()
        change(model)
        with torch.inference_mode():
            call(x)
        call(x).sum().backward()
        torch.optim.SGD(model.parameters()).step()
        assert all(parameter.grad is not None for parameter in model.parameters())


def _step_with_a_frozen_forward(made: Any, call: Any, frozen: Any, *, thaws: bool) -> None:
    x = torch.ones(2, 4)
    loss = call(x).square().mean()
    frozen(made).requires_grad_(requires_grad=False)
    other = call(x.clone().requires_grad_()).square().mean()
    if thaws:
        frozen(made).requires_grad_(requires_grad=True)
    (loss + other).backward()


def _check_frozen_between(run: Run) -> None:
    for frozen in (lambda made: made, lambda made: made[2]):
        for thaws in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
            reference = copy.deepcopy(model)
            fully_shard(model)
            call = model if run is Run.EAGER else compile_eagerly(model)
            for _ in range(2):
                _step_with_a_frozen_forward(model, call, frozen, thaws=thaws)
                _step_with_a_frozen_forward(reference, reference, frozen, thaws=thaws)
                for made in (model, reference):
                    made.requires_grad_(requires_grad=True)
            for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
                assert (parameter.grad is None) == (expected.grad is None)
                if isinstance(parameter.grad, DTensor):
                    torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
            model(torch.ones(2, 4))
            assert not any(unit.replaced_groups for unit in units(model)), "they are gone with their graphs"


@pytest.mark.parametrize("run", [Run.EAGER, Run.SHARDED])
def test_gradients_of_a_forward_reach_parameters_that_are_frozen_for_the_next_one(run: Run) -> None:
    run_ranks(_check_frozen_between, run)


def _beside_one_process(run: Run) -> tuple[nn.Sequential, Any, nn.Sequential]:
    """A sharded model, what is called in its place, and the same model unsharded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    reference = copy.deepcopy(model)
    fully_shard(model)
    call = model if run is Run.EAGER else compile_eagerly(model)
    return model, call, reference


def _check_frozen_before_backward(run: Run) -> None:
    model, call, reference = _beside_one_process(run)
    for place in (0, 2):
        for made, called in ((model, call), (reference, reference)):
            loss = called(torch.ones(2, 4)).square().mean()
            made[place].requires_grad_(requires_grad=False)
            loss.backward()
            made[place].requires_grad_(requires_grad=True)
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert (parameter.grad is None) == (expected.grad is None)
            if isinstance(parameter.grad, DTensor):
                torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


def _check_frozen_before_accumulating(run: Run) -> None:
    model, call, reference = _beside_one_process(run)
    for made, called in ((model, call), (reference, reference)):
        with no_sync(model):
            loss = called(torch.ones(2, 4)).square().mean()
            made[0].requires_grad_(requires_grad=False)
            loss.backward()
        made[0].requires_grad_(requires_grad=True)
        called(torch.ones(2, 4)).square().mean().backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
    with no_sync(model):
        call(torch.ones(2, 4)).square().mean().backward()
    loss = call(torch.ones(2, 4)).square().mean()
    model[0].requires_grad_(requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"(?s)frozen between a forward and its backward.*0\."):
        loss.backward()


@pytest.mark.parametrize("run", [Run.EAGER, Run.SHARDED])
def test_parameters_that_are_frozen_before_the_backward_get_no_gradient(run: Run) -> None:
    run_ranks(_check_frozen_before_backward, run)
    run_ranks(_check_frozen_before_accumulating, run)


def test_gradients_of_a_forward_before_a_cast_are_refused_by_name() -> None:
    with fake_world(2):
        model = fully_shard(nn.Linear(4, 4))
        loss = model(torch.ones(1, 4)).sum()
        model.double()
        model(torch.ones(1, 4, dtype=torch.float64))
        with pytest.raises(UnsupportedModelError, match="changed its dtype"):
            loss.backward()


@pytest.mark.parametrize("place", [0, 99])
def test_a_dict_that_took_the_place_of_a_modules_own_is_noticed_by_the_next_step(place: int) -> None:
    with fake_world(1):
        model = fully_shard(_Scales())
        before = _step(model, 3)
        layer = model.get_submodule(f"each.{place}")
        layer._parameters = {"weight": nn.Parameter(torch.zeros(2, 2)), "bias": None}  # a dict, whatever is in it
        after = _step(model, 1)
        assert not torch.equal(before, after), "the new value counts"


@pytest.mark.core
def test_a_class_that_somebody_gave_a_module_stays() -> None:
    with fake_world(2):
        model: Any = fully_shard(_Scales(3))
        layer = model.get_submodule("each.1")

        class Doubled(type(layer)):  # type: ignore[misc]
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return 2 * super().forward(x)

        layer.__class__ = Doubled
        expected = _step(model, 1)
        with full_params(model):
            pass
        assert type(layer) is Doubled
        model.set_gradient_divide_factor(3.0)
        assert isinstance(layer, Doubled)
        assert "divide=3" in type(layer)._fsdp_key.reads[0].text
        model.reset_iter_state()
        assert torch.equal(_step(model, 1), expected)
        assert isinstance(layer.weight, DTensor), "outside of a forward"
