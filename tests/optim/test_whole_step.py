"""`whole_step`: the numbers of one process from optimizers that look at whole parameters, on any shards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.shards import shard_like
from fsdp_compile.optim.flat_step import flat_step
from fsdp_compile.optim.whole_step import whole_step
from fsdp_compile.state.full_tensors import full_tensors
from tests import long
from tests.fsdp2.models import mesh_of
from tests.ranks import on_ranks, run_ranks

_Make = Callable[[Iterable[Any]], optim.Optimizer]


class _Lamb(optim.Optimizer):
    """Of another library: it looks at the norm of each parameter, and has state of other shapes; "mu" is torch's name
    of a number."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("mu", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.5)
                state["norms"] = (*state.get("norms", ()), float(parameter.norm()))
                parameter.add_(state["mu"], alpha=-group["lr"] * state["norms"][-1])


class _Counting(optim.Optimizer):
    """Of another library: it counts its steps in its groups, as a tensor and as a number, or what it has trained."""

    def __init__(self, params: Iterable[Any], *, elements: bool = False) -> None:
        super().__init__(params, {"lr": 0.1, "count": torch.zeros(()), "elements": elements})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / (group["steps"] + group["count"].item()))
                    if group["elements"]:
                        group["count"] += parameter.numel()


OPTIMIZERS: dict[str, _Make] = {
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1, weight_decay=0.1),
    "Adafactor, foreach": lambda p: optim.Adafactor(p, lr=0.1, foreach=True),
    "Muon": lambda p: optim.Muon(p, lr=0.1),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.1),
    "of another library": _Lamb,
    "counting in its groups": _Counting,
}
NOT_OF_TORCH = ("of another library", "counting in its groups")
ONLY_MATRICES = ("Muon",)


class _Model(nn.Module):
    """Matrices of uneven rows, in two dtypes, vectors, a number and a frozen weight. Input: `[rows, 6]`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 13)
        self.down = nn.Linear(13, 2)
        self.wide = nn.Linear(2, 5, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(5, 5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.tanh(self.up(x))) * self.scale
        return self.wide(x.double()).float() @ self.frozen


def _made() -> Any:
    torch.manual_seed(0)
    return _Model()


def _trained_by(name: str, model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and (p.dim() == 2 or name not in ONLY_MATRICES)]


def _set_gradients(model: nn.Module, seed: int, *, skip: str) -> None:
    """The same full gradients, whatever the layout."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, dtype=parameter.dtype)
        if not parameter.requires_grad or name == skip:
            parameter.grad = None
        elif isinstance(parameter, DTensor):
            parameter.grad = shard_like(gradient, parameter)
        else:
            parameter.grad = gradient


def _check_bits(name: str, mesh: tuple[int, ...]) -> None:
    """One parameter has no gradient in one step."""
    reference = _made()
    model = _sharded(mesh)
    mine = whole_step(OPTIMIZERS[name](_trained_by(name, model)), per_parameter=name in NOT_OF_TORCH)
    theirs = OPTIMIZERS[name](_trained_by(name, reference))
    for seed in range(3):
        for each, optimizer in ((model, mine), (reference, theirs)):
            _set_gradients(each, seed, skip="down.weight" if seed == 1 else "")
            optimizer.step()
    found = dict(full_tensors(model))
    for key, value in reference.state_dict().items():
        assert torch.equal(found[key], value), key
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        _assert_same_state(mine.state.get(parameter, {}), theirs.state.get(other, {}), other)


def _assert_same_state(mine: dict[str, Any], theirs: dict[str, Any], parameter: torch.Tensor) -> None:
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        if not isinstance(value, torch.Tensor):
            assert mine[key] == value, key
            continue
        is_number = key == "step" or (key == "mu" and value.dim() == 0)
        assert isinstance(mine[key], DTensor) == (
            value.dim() > 0 and value.shape == parameter.shape and not is_number
        ), key
        full = mine[key].full_tensor() if isinstance(mine[key], DTensor) else mine[key]
        assert torch.equal(full, value), key


@long.parametrize(
    ("mesh", "names"),
    [((2,), OPTIMIZERS), ((3,), OPTIMIZERS), ((2, 2), ["Adafactor", "Muon"])],
    always=[((2,), OPTIMIZERS)],
)
def test_values_and_state_are_those_of_one_process(mesh: tuple[int, ...], names: Iterable[str]) -> None:
    run_ranks(_check_all_bits, list(names), mesh, world_size=torch.Size(mesh).numel())


def _check_all_bits(names: list[str], mesh: tuple[int, ...]) -> None:
    for name in names:
        _check_bits(name, mesh)


def _sharded(mesh: tuple[int, ...] = (2,)) -> Any:
    model = _made()
    for layer in (model.up, model.wide):
        fully_shard(layer, mesh=mesh_of(mesh))
    return fully_shard(model, mesh=mesh_of(mesh), ignored_params={model.scale})


@on_ranks()
def test_training_equals_one_process() -> None:
    """With a schedule, a frozen parameter, and one that is not sharded."""
    model, reference = _sharded(), _made()
    model.up.bias.requires_grad_(requires_grad=False)
    reference.up.bias.requires_grad_(requires_grad=False)
    steps = []
    for each in (model, reference):
        groups: list[Any] = [{"params": [each.scale], "lr": 0.2}, {"params": _trained_by("Muon", each)}]
        optimizer = optim.Adafactor(groups, lr=0.1)
        steps.append((optimizer, optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)))
    whole_step(steps[0][0])
    for seed in range(3):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))  # the same on all ranks
        for run, (optimizer, schedule) in zip((model, reference), steps, strict=True):
            run(batch).square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert all(isinstance(p, DTensor) for p in optimizer_params(steps[0][0]) if p.dim())
    for key, value in full_tensors(model):
        torch.testing.assert_close(value, reference.state_dict()[key], rtol=1e-4, atol=1e-5, msg=key)


def optimizer_params(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@on_ranks()
def test_state_is_saved_and_loaded() -> None:
    model = _sharded()
    optimizer = whole_step(optim.Adafactor(_trained_by("", model), lr=0.1))
    resumed_model = _sharded()
    _set_gradients(model, 0, skip="")
    optimizer.step()
    resumed_model.load_state_dict(model.state_dict())
    resumed = whole_step(optim.Adafactor(_trained_by("", resumed_model), lr=0.1))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, own in ((model, optimizer), (resumed_model, resumed)):
        _set_gradients(each, 1, skip="")
        own.step()
    found = dict(full_tensors(resumed_model))
    for key, value in full_tensors(model):
        assert torch.equal(found[key], value), key


def test_what_is_not_known_to_update_parameters_one_by_one_is_refused() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    with pytest.raises(ConfigError, match=r"not known to update each parameter independently(.|\n)*Adafactor, Muon"):
        whole_step(_Lamb(parameters))
    with pytest.raises(ConfigError, match="LBFGS is not known"):
        whole_step(optim.LBFGS(parameters))
    with pytest.raises(ConfigError, match="not known to update each element"):
        flat_step(whole_step(optim.Adafactor(parameters)))


@on_ranks()
def test_groups_count_a_step_once_and_what_differs_by_parameter_is_refused() -> None:
    """Two groups: one of a sharded parameter and one that is not, and one of sharded parameters alone."""
    runs = []
    for is_sharded in (True, False):
        model = _made()
        if is_sharded:
            fully_shard(model, ignored_params={model.scale})
        groups: list[Any] = [{"params": [model.scale, model.up.weight]}, {"params": [model.up.bias, model.down.weight]}]
        count = torch.zeros(())
        optimizer = _Counting([{**group, "count": count.clone()} for group in groups])
        held = [group["count"] for group in optimizer.param_groups]
        if is_sharded:
            whole_step(optimizer, per_parameter=True)
        for seed in range(3):
            _set_gradients(model, seed, skip="")
            optimizer.step()
        assert [each.item() for each in held] == [3, 3]
        assert all(group["count"] is each for group, each in zip(optimizer.param_groups, held, strict=True))
        assert [group["steps"] for group in optimizer.param_groups] == [3, 3]
        runs.append(dict(full_tensors(model)))
    for key, value in runs[0].items():
        assert torch.equal(value, runs[1][key]), key
    model = _sharded()
    _set_gradients(model, 0, skip="")
    several = whole_step(_Counting(_trained_by("", model), elements=True), per_parameter=True)
    with pytest.raises(
        ConfigError, match=r"_Counting writes 'count' into its group(.|\n)*depends only on that parameter"
    ):
        several.step()


@on_ranks()
def test_an_error_leaves_the_optimizer_as_it_was() -> None:
    model = _sharded()
    optimizer = optim.Muon(_trained_by("Muon", model), lr=0.1)
    groups, given, state = optimizer.param_groups, optimizer.param_groups[0]["params"], optimizer.state
    whole_step(optimizer)
    optimizer.register_step_pre_hook(_fail)
    _set_gradients(model, 0, skip="")
    with pytest.raises(KeyError):
        optimizer.step()
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0]["params"] is given
    assert optimizer.state is state


def _fail(*_: Any) -> None:
    raise KeyError
