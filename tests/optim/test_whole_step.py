"""`whole_step`: the numbers of one process from optimizers that look at whole parameters, on any shards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from fsdp_compile.errors import ConfigError, RankFailedError
from fsdp_compile.fsdp2.shards import shard_like
from fsdp_compile.optim.flat_step import flat_step
from fsdp_compile.optim.grad_scaler import GradScaler
from fsdp_compile.optim.owners import matrix_cost, shares_of
from fsdp_compile.optim.whole_step import whole_step
from fsdp_compile.state.full_params import full_tensors
from tests import long
from tests.fsdp2.models import mesh_of
from tests.optim.library_optimizers import Counting, Lamb, Shampoo, Soap, with_gradients
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import local, whole

_Make = Callable[[Iterable[Any]], optim.Optimizer]


OPTIMIZERS: dict[str, _Make] = {
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1, weight_decay=0.1),
    "Adafactor, foreach": lambda p: optim.Adafactor(p, lr=0.1, foreach=True),
    "Muon": lambda p: optim.Muon(p, lr=0.1),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.1),
    "of another library": Lamb,
    "counting in its groups": Counting,
    "Shampoo": Shampoo,
    "SOAP": Soap,
}
NOT_OF_TORCH = ("of another library", "counting in its groups", "Shampoo", "SOAP")
ONLY_MATRICES = ("Muon", "Shampoo", "SOAP")


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


def _made(dtype: torch.dtype | None = None) -> Any:
    torch.manual_seed(0)
    return _Model().to(dtype)


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


def _check_bits(name: str, mesh: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """One parameter has no gradient in one step."""
    reference = _made(dtype)
    model = _sharded(mesh, dtype)
    mine = whole_step(OPTIMIZERS[name](_trained_by(name, model)), per_parameter=name in NOT_OF_TORCH)
    theirs = OPTIMIZERS[name](_trained_by(name, reference))
    for seed in range(5):
        for each, optimizer in ((model, mine), (reference, theirs)):
            _set_gradients(each, seed, skip="down.weight" if seed == 1 else "")
            optimizer.step()
    found = dict(full_tensors(model))
    for key, value in reference.state_dict().items():
        assert torch.equal(found[key], value), key
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        _assert_same_state(mine.state.get(parameter, {}), theirs.state.get(other, {}), other)


def _assert_same_state(mine: dict[str, Any], theirs: dict[str, Any], parameter: torch.Tensor) -> None:
    """And that all of it is sharded but numbers."""
    assert mine.keys() == theirs.keys()
    for key, expected in theirs.items():
        for found, value in zip(tree_leaves(mine[key]), tree_leaves(expected), strict=True):
            if isinstance(value, torch.Tensor):
                assert isinstance(found, DTensor) == (value.dim() > 0 and key != "step" and parameter.dim() > 0), key
                assert torch.equal(whole(found), value), key
            else:
                assert found == value, key


@long.parametrize(
    ("mesh", "names"),
    [((2,), OPTIMIZERS), ((3,), OPTIMIZERS), ((4,), OPTIMIZERS), ((2, 2), OPTIMIZERS)],
    always=[((2,), OPTIMIZERS)],
)
def test_values_and_state_are_those_of_one_process(mesh: tuple[int, ...], names: Iterable[str]) -> None:
    run_ranks(_check_all_bits, list(names), mesh, world_size=torch.Size(mesh).numel())


def _check_all_bits(names: list[str], mesh: tuple[int, ...]) -> None:
    for name in names:
        _check_bits(name, mesh)
        if name in ("Adafactor", "Muon"):
            _check_bits(name, mesh, torch.bfloat16)


def _sharded(mesh: tuple[int, ...] = (2,), dtype: torch.dtype | None = None) -> Any:
    model = _made(dtype)
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


@pytest.mark.parametrize("full", [False, True])
@on_ranks()
def test_state_is_saved_and_loaded(*, full: bool) -> None:
    """As it is, or as full tensors, which the state of a single process has."""
    model = _sharded()
    optimizer = whole_step(optim.Adafactor(_trained_by("", model), lr=0.1))
    resumed_model = _sharded()
    _set_gradients(model, 0, skip="")
    optimizer.step()
    resumed_model.load_state_dict(model.state_dict())
    resumed = whole_step(optim.Adafactor(_trained_by("", resumed_model), lr=0.1))
    state = copy.deepcopy(optimizer.state_dict())
    resumed.load_state_dict(tree_map(whole, state) if full else state)
    for each, own in ((model, optimizer), (resumed_model, resumed)):
        _set_gradients(each, 1, skip="")
        own.step()
    found = dict(full_tensors(resumed_model))
    for key, value in full_tensors(model):
        assert torch.equal(found[key], value), key


def test_what_is_not_known_to_update_parameters_one_by_one_is_refused() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    with pytest.raises(ConfigError, match=r"not known to update each parameter independently(.|\n)*Adafactor, Muon"):
        whole_step(Lamb(parameters))
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
        optimizer = Counting([{**group, "count": count.clone()} for group in groups])
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
    several = whole_step(Counting(_trained_by("", model), elements=True), per_parameter=True)
    with pytest.raises(
        ConfigError, match=r"Counting writes 'count' into its group(.|\n)*depends only on that parameter"
    ):
        several.step()


@on_ranks()
def test_each_matrix_is_updated_once_in_the_world_and_what_is_not_sharded_on_each_rank() -> None:
    model = _sharded()
    optimizer = whole_step(optim.Adafactor(_trained_by("", model), lr=0.1))
    updated: list[Any] = []
    optimizer.register_step_post_hook(lambda each, *_: updated.extend(optimizer_params(each)))
    for seed in range(2):
        _set_gradients(model, seed, skip="")
        optimizer.step()
    sharded = [p for p in _trained_by("", model) if isinstance(p, DTensor)]
    count = torch.tensor([len(updated) - 2])  # without the one that is not sharded
    assert count < 2 * len(sharded)
    dist.all_reduce(count)
    assert count == 2 * len(sharded)
    assert sum(p is model.scale for p in updated) == 2


def test_owners_take_about_as_long() -> None:
    """A Llama of 12 layers on 4 and on 16 ranks."""
    layer = [(512, 512)] * 4 + [(1376, 512)] * 2 + [(512, 1376)]
    costs = [matrix_cost(torch.Size(shape)) for shape in layer * 12]
    assert matrix_cost(torch.Size((4, 6))) == 4 * 6 * 4
    assert matrix_cost(torch.Size((4, 2, 3))) == 4 * 6 * 4
    assert matrix_cost(torch.Size((7,))) == 7
    for ranks in (4, 16):
        shares = shares_of(costs, ranks)
        assert sorted(job for share in shares for job in share) == list(range(len(costs)))
        loads = [sum(costs[job] for job in share) for share in shares]
        assert max(loads) <= 1.1 * sum(loads) / ranks


@on_ranks()
def test_costs_divide_parameters() -> None:
    """One that costs more than all others has a rank for itself."""
    model = _sharded()
    matrices = _trained_by("Muon", model)
    optimizer = whole_step(optim.Muon(matrices, lr=0.1), cost=lambda shape: 100.0 if shape == (2, 13) else 1.0)
    updated: list[torch.Size] = []
    optimizer.register_step_post_hook(lambda each, *_: updated.extend(p.shape for p in optimizer_params(each)))
    _set_gradients(model, 0, skip="")
    optimizer.step()
    own = [torch.Size((2, 13))]
    assert updated == own if own[0] in updated else len(updated) == len(matrices) - 1


class _Listing(Counting):
    """Counts its steps in a list of its group."""

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group.setdefault("history", []).append(1)
        for group, parameter, _ in with_gradients(self):
            parameter.sub_(parameter.grad, alpha=group["lr"] / len(group["history"]))


@on_ranks()
def test_lists_in_groups_count_once_and_tensors_of_several_groups_are_refused() -> None:
    model, reference = _sharded(), _made()
    mine = whole_step(_Listing(_trained_by("", model)), per_parameter=True)
    theirs = _Listing(_trained_by("", reference))
    for seed in range(3):
        for each, optimizer in ((model, mine), (reference, theirs)):
            _set_gradients(each, seed, skip="")
            optimizer.step()
    assert mine.param_groups[0]["history"] == [1, 1, 1]
    for key, value in full_tensors(model):
        assert torch.equal(value, reference.state_dict()[key]), key
    groups: list[Any] = [{"params": [p]} for p in _trained_by("Muon", model)]
    several = whole_step(Counting(groups), per_parameter=True)
    _set_gradients(model, 0, skip="")
    with pytest.raises(ConfigError, match="writes into 'count', one tensor of several groups"):
        several.step()


def _on_two_meshes(*, fails: bool) -> None:
    """Ranks 2 and 3 do not train what they have on the smaller mesh."""
    mesh = mesh_of((2, 2))
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"part": nn.Linear(6, 8, bias=False), "rest": nn.Linear(6, 8, bias=False)})
    reference = copy.deepcopy(model)
    fully_shard(model["part"], mesh=mesh["shard"])
    fully_shard(model["rest"])
    optimizer = whole_step(optim.Adafactor(model.parameters(), lr=0.1))
    plain = optim.Adafactor(reference.parameters(), lr=0.1)
    for each in (model, reference):
        _set_gradients(each, 0, skip="part.weight" if dist.get_rank() > 1 else "")
    if fails and dist.get_rank() == 0:
        optimizer.register_step_pre_hook(_fail)
    if fails:
        with pytest.raises(KeyError if dist.get_rank() == 0 else RankFailedError, match="no such thing"):
            optimizer.step()
        return
    optimizer.step()
    plain.step()
    for key, value in full_tensors(model):
        assert torch.equal(value, reference.state_dict()[key]), key


@pytest.mark.long
@pytest.mark.parametrize("fails", [False, True])
def test_two_meshes_of_which_ranks_train_different_parts(*, fails: bool) -> None:
    run_ranks(_on_two_meshes, world_size=4, timeout_s=60, fails=fails)


@on_ranks()
def test_ranks_that_list_parameters_in_other_orders() -> None:
    model, reference = _sharded(), _made()
    parameters = _trained_by("", model)
    mine = whole_step(optim.Adafactor(parameters[:: -1 if dist.get_rank() else 1], lr=0.1))
    theirs = optim.Adafactor(_trained_by("", reference), lr=0.1)
    for seed in range(2):
        for each, optimizer in ((model, mine), (reference, theirs)):
            _set_gradients(each, seed, skip="")
            optimizer.step()
    for key, value in full_tensors(model):
        assert torch.equal(value, reference.state_dict()[key]), key


class _Mixed(Lamb):
    """Looks at norms in one group, and adds gradients in the other."""

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            if group["plain"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        seen = self.state[parameter].setdefault("sum", torch.zeros_like(parameter))
                        parameter.sub_(seen.add_(parameter.grad), alpha=group["lr"])
        self.param_groups = [group for group in groups if not group["plain"]]
        super().step()
        self.param_groups = groups


@on_ranks()
def test_a_scaler_leaves_out_a_step_whose_gradients_are_not_finite() -> None:
    model, reference = _sharded(), _made()
    steps = []
    for each in (model, reference):
        made = optim.Adafactor(_trained_by("", each), lr=0.1)
        scaler = GradScaler("cpu", init_scale=4.0)
        steps.append((each, made if each is reference else whole_step(made), scaler))
    for seed in range(3):
        for each, optimizer, scaler in steps:
            _set_gradients(each, seed, skip="")
            scaler.scale(torch.ones(()))
            if seed == 1:
                for parameter in _trained_by("", each):
                    local(parameter.grad).fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
    assert steps[0][2].get_scale() == steps[1][2].get_scale() == 2.0
    for key, value in full_tensors(model):
        assert torch.equal(value, reference.state_dict()[key]), key


@on_ranks()
def test_elementwise_groups_are_updated_on_shards() -> None:
    runs = []
    shapes: list[torch.Size] = []
    for is_sharded in (True, False):
        model = _sharded() if is_sharded else _made()
        matrices = [p for p in _trained_by("", model) if p.dim() == 2]
        others = [p for p in _trained_by("", model) if p.dim() != 2]
        optimizer: Any = _Mixed([{"params": matrices, "plain": False}, {"params": others, "plain": True}])
        if is_sharded:
            whole_step(optimizer, per_parameter=True, elementwise=lambda group: group["plain"])
            optimizer.register_step_post_hook(lambda each, *_: shapes.extend(p.shape for p in optimizer_params(each)))
        for seed in range(3):
            _set_gradients(model, seed, skip="")
            optimizer.step()
        if is_sharded:
            assert model.up.bias.shape not in shapes
            assert isinstance(optimizer.state[model.up.bias]["sum"], DTensor)
        runs.append(dict(full_tensors(model)) if is_sharded else model.state_dict())
    for key, value in runs[1].items():
        assert torch.equal(runs[0][key], value), key


@on_ranks()
def test_an_update_that_fails_on_one_rank_is_an_error_on_all() -> None:
    model = _sharded()
    optimizer = whole_step(optim.Muon(_trained_by("Muon", model), lr=0.1))
    if dist.get_rank() == 1:
        optimizer.register_step_pre_hook(_fail)
    _set_gradients(model, 0, skip="")
    if dist.get_rank() == 1:
        with pytest.raises(KeyError, match="no such thing"):
            optimizer.step()
    else:
        with pytest.raises(RankFailedError, match=r"rank 1 failed in its update: KeyError: .*no such thing"):
            optimizer.step()


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
    raise KeyError("no such thing")


def _save(folder: str) -> dict[str, torch.Tensor]:
    """Two steps, a save, and a third one."""
    model, optimizer = _resumable()
    for seed in range(2):
        _set_gradients(model, seed, skip="")
        optimizer.step()
    dcp.save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder
    )
    return _next(model, optimizer)


def _load(folder: str) -> dict[str, torch.Tensor]:
    model, optimizer = _resumable()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return _next(model, optimizer)


def _resumable() -> tuple[Any, Any]:
    model = _made()
    for layer in (model.up, model.wide):
        fully_shard(layer)
    fully_shard(model, ignored_params={model.scale})
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() == 2]
    return model, whole_step(Shampoo(matrices), per_parameter=True)


def _next(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    _set_gradients(model, 2, skip="")
    optimizer.step()
    return {key: value.clone() for key, value in full_tensors(model)}


@pytest.mark.long
def test_state_of_any_shape_is_resumed_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    expected = run_ranks(_save, str(tmp_path), world_size=4)[0]
    for ranks in (2, 3):
        found = run_ranks(_load, str(tmp_path), world_size=ranks)[0]
        for key, value in expected.items():
            assert torch.equal(found[key], value), key
