"""What users do to a sharded model between the steps of compiled code: the next step uses it.

Every change is done to a sharded model and to a copy of it in one process; both are then trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_compile import full_params, fully_shard
from tests import long
from tests.fake_world import fake_world
from tests.fsdp2.decoder import VOCABULARY, Decoder, shard
from tests.models.outlines import Odd, Small
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess, adamw, compare_gradients, compile_eagerly, compile_in_place, made

Change = Callable[[Any], object]


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-1, momentum=0.9, weight_decay=0.1)


def _double(model: Any) -> None:
    model.to(torch.float64)


def _thaw_all(model: Any) -> None:
    model.requires_grad_(requires_grad=True)


def _initialize(model: Any) -> None:
    nn.init.constant_(model.up.weight, 0.3)
    nn.init.zeros_(model.up.bias)
    with torch.no_grad():
        model.down.weight.mul_(0.5)
        model.scale.fill_(2.0)


def _write_through_data(model: Any) -> None:
    model.up.weight.data.mul_(0.5)
    model.scale.data.fill_(-1.0)


KEEPING: dict[str, Change] = {
    "freeze and thaw": lambda model: model.up.requires_grad_(requires_grad=False).requires_grad_(),
    "freeze one": lambda model: model.up.weight.requires_grad_(requires_grad=False),
    "freeze all but one": lambda model: model.requires_grad_(requires_grad=False).down.weight.requires_grad_(),
    "initialize": _initialize,
    "write through data": _write_through_data,
}
"""Changes after which the parameters are the same objects, so that the optimizer goes on with them."""


@pytest.mark.core
@long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.SHARDED])
@long.parametrize("change", KEEPING, always=["freeze one", "initialize"])
@on_ranks()
def test_compiled_code_sees_changes(change: str, how: Run) -> None:
    """A graph that was compiled before the change runs on, or is compiled again: never with old values."""
    pair = WithOneProcess(Small, how, optimizer=_momentum)
    for do in (KEEPING[change], _thaw_all):
        pair.train(steps=1)
        pair.change(do)
    pair.train(steps=1)


@on_ranks()
def test_training_goes_on_in_another_dtype() -> None:
    pair = WithOneProcess(Odd, shape=10, optimizer=_momentum)
    pair.train(steps=1)
    pair.change(_double)
    pair.optimizers.clear()
    pair.dtype = torch.float64
    pair.optimize(adamw)
    pair.train()


@pytest.mark.long
@pytest.mark.core
@on_ranks()
def test_an_optimizer_step_after_a_conversion_is_not_lost() -> None:
    pair = WithOneProcess(Small, optimizer=adamw)
    pair.train(steps=1)
    pair.optimizers.clear()
    pair.backward()
    pair.change(_double)
    pair.optimize(adamw)
    pair.update()
    pair.dtype = torch.float64
    pair.train(steps=1)


@pytest.mark.core
@on_ranks()
def test_from_meta_through_to_empty_to_training() -> None:
    with torch.device("meta"):
        model = Odd()
    # A machine with a GPU would give a model on meta a mesh of GPUs.
    fully_shard(model, mesh=None if not torch.accelerator.is_available() else init_device_mesh("cpu", (2,)))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    reference = Odd()
    for name, parameter in model.named_parameters():
        value = reference.get_parameter(name).detach()
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            parameter.copy_(value)
    compiled = compile_eagerly(model)
    x = torch.randn(4, 10)
    compiled(x).square().mean().backward()
    reference(x).square().mean().backward()
    compare_gradients(model, reference)


def _three_layers() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


CHANGES: dict[str, Change] = {
    "thaw": lambda model: model[0].requires_grad_(),
    "keep": lambda model: model.set_reshard_after_backward(False),
    "to float64 and back": lambda model: model.double().float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_training_goes_on_after_an_evaluation_in_inference_mode_that_follows_a_change(change: str) -> None:
    with fake_world(2):
        model = _three_layers()
        model[0].requires_grad_(change != "thaw")
        fully_shard(model)
        call = compile_eagerly(model)
        x = torch.ones(2, 4)
        call(x).sum().backward()
        torch.optim.SGD(model.parameters()).step()
        CHANGES[change](model)
        with torch.inference_mode():
            call(x)
        call(x).sum().backward()
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # FSDP2 leaves what it keeps after backward registered
        torch.optim.SGD(model.parameters()).step()
        assert all(parameter.grad is not None for parameter in model.parameters())


def _by_blocks(model: Any) -> None:
    shard(model)
    for block in model.blocks:
        compile_in_place(block)


def _tokens(step: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(step))


@on_ranks()
def test_a_model_that_was_frozen_for_one_forward_is_trained_by_blocks() -> None:
    """The root's own parameters are still gathered when they are thawed, and FSDP2 has those registered."""
    pair = WithOneProcess(Decoder, Run.EAGER, _by_blocks, optimizer=adamw, batch=_tokens, twice=False)
    pair.change(lambda model: model.requires_grad_(requires_grad=False))
    pair.losses()
    pair.change(_thaw_all)
    pair.train(steps=2)


def _step_with_a_frozen_forward(made: Any, call: Any, frozen: Any, *, thaws: bool) -> None:
    x = torch.ones(2, 4)
    loss = call(x).square().mean()
    frozen(made).requires_grad_(requires_grad=False)
    other = call(x.clone().requires_grad_()).square().mean()
    if thaws:
        frozen(made).requires_grad_(requires_grad=True)
    (loss + other).backward()


@pytest.mark.long
@on_ranks()
def test_gradients_of_a_forward_reach_parameters_that_are_frozen_for_the_next_one() -> None:
    for frozen in (lambda model: model, lambda model: model[2]):
        for thaws, in_place in ((True, False), (True, True), (False, False)):
            model, reference = made(_three_layers), made(_three_layers)
            fully_shard(model)
            call = compile_in_place(model) if in_place else compile_eagerly(model)
            for _ in range(2):
                _step_with_a_frozen_forward(model, call, frozen, thaws=thaws)
                _step_with_a_frozen_forward(reference, reference, frozen, thaws=thaws)
                for each in (model, reference):
                    each.requires_grad_(requires_grad=True)
            compare_gradients(model, reference)


@pytest.mark.core
def test_a_class_that_somebody_gave_a_module_stays() -> None:
    with fake_world(2):
        model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        compiled, x = compile_eagerly(model), torch.ones(1, 4)
        before = compiled(x)
        layer = model[1]

        class Doubled(type(layer)):  # type: ignore[misc]
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return 2 * super().forward(x)

        layer.__class__ = Doubled
        assert torch.equal(compiled(x), 2 * before)
        with full_params(model):
            pass
        assert isinstance(layer, Doubled)
        assert torch.equal(compiled(x), 2 * before)
        assert isinstance(layer.weight, DTensor), "outside of a forward"
