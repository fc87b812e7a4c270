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
from fsdp_compile.optim.gradients import GradScaler
from fsdp_compile.optim.owners import matrix_cost, shares_of
from fsdp_compile.optim.whole_step import whole_step
from fsdp_compile.state.full_params import full_tensors
from tests import long
from tests.fsdp2.models import mesh_of
from tests.optim.library_optimizers import Counting, Lamb, Listing, Mixed, Shampoo, Soap
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import local, whole

Side = tuple[Any, Any]
"""A model and its optimizer."""

OPTIMIZERS: dict[str, Callable[[Iterable[Any]], optim.Optimizer]] = {
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1, weight_decay=0.1),
    "Adafactor, foreach": lambda p: optim.Adafactor(p, lr=0.1, foreach=True),
    "Muon": lambda p: optim.Muon(p, lr=0.1),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.1),
    "of another library": Lamb,
    "counting in its groups": Counting,
    "listing in its groups": Listing,
    "Shampoo": Shampoo,
    "SOAP": Soap,
}
NOT_OF_TORCH = ("of another library", "counting in its groups", "listing in its groups", "Shampoo", "SOAP")
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


def _sharded(mesh: tuple[int, ...] = (2,), dtype: torch.dtype | None = None) -> Any:
    model = _made(dtype)
    for layer in (model.up, model.wide):
        fully_shard(layer, mesh=mesh_of(mesh))
    return fully_shard(model, mesh=mesh_of(mesh), ignored_params={model.scale})


def _trained(model: nn.Module, name: str = "") -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and (p.dim() == 2 or name not in ONLY_MATRICES)]


def _optimized(model: Any, name: str = "Adafactor") -> Side:
    """A model that is sharded, with an optimizer that sees whole parameters."""
    optimizer = OPTIMIZERS[name](_trained(model, name))
    return model, whole_step(optimizer, per_parameter=name in NOT_OF_TORCH)


def _pair(name: str = "Adafactor", mesh: tuple[int, ...] = (2,), dtype: torch.dtype | None = None) -> tuple[Side, Side]:
    reference = _made(dtype)
    return _optimized(_sharded(mesh, dtype), name), (reference, OPTIMIZERS[name](_trained(reference, name)))


def _set_gradients(model: nn.Module, seed: int, *, skip: str = "") -> None:
    """The same full gradients, whatever the layout."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, dtype=parameter.dtype)
        if not parameter.requires_grad or name == skip:
            parameter.grad = None
        else:
            parameter.grad = shard_like(gradient, parameter) if isinstance(parameter, DTensor) else gradient


def _step(*sides: Side, steps: int = 1, skip: dict[int, str] | None = None) -> None:
    """Steps of each side by the same gradients, of which those in `skip` are missing."""
    for seed in range(steps):
        for model, optimizer in sides:
            _set_gradients(model, seed, skip=(skip or {}).get(seed, ""))
            optimizer.step()


def _assert_equal(model: nn.Module, reference: nn.Module) -> None:
    found = dict(full_tensors(model))
    for key, value in full_tensors(reference):
        assert torch.equal(found[key], value), key


def _updated(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    """What the optimizer updates on this rank from now on, in a list that grows."""
    found: list[torch.Tensor] = []
    optimizer.register_step_post_hook(
        lambda each, *_: found.extend(p for group in each.param_groups for p in group["params"])
    )
    return found


def _fail(*_: Any) -> None:
    raise KeyError("no such thing")


def _check_bits(name: str, mesh: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """One parameter has no gradient in one step; all of the state is sharded but numbers."""
    (model, mine), (reference, theirs) = _pair(name, mesh, dtype)
    _step((model, mine), (reference, theirs), steps=5, skip={1: "down.weight"})
    _assert_equal(model, reference)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        own, wanted = mine.state.get(parameter, {}), theirs.state.get(other, {})
        assert own.keys() == wanted.keys()
        for key, expected in wanted.items():
            for found, value in zip(tree_leaves(own[key]), tree_leaves(expected), strict=True):
                if isinstance(value, torch.Tensor):
                    assert isinstance(found, DTensor) == (value.dim() > 0 and key != "step" and other.dim() > 0), key
                    assert torch.equal(whole(found), value), key
                else:
                    assert found == value, key
    if name == "listing in its groups":
        assert mine.param_groups[0]["history"] == [1] * 5


@long.parametrize("mesh", [(2,), (3,), (4,), (2, 2)], always=[(2,)])
@on_ranks(world_size=lambda mesh: torch.Size(mesh).numel())
def test_values_and_state_are_those_of_one_process(mesh: tuple[int, ...]) -> None:
    for name in OPTIMIZERS:
        _check_bits(name, mesh)
        if name in ("Adafactor", "Muon"):
            _check_bits(name, mesh, torch.bfloat16)


@on_ranks()
def test_training_equals_one_process() -> None:
    """With a schedule, a frozen parameter, and one that is not sharded."""
    model, reference = _sharded(), _made()
    for each in (model, reference):
        each.up.bias.requires_grad_(requires_grad=False)
        groups: list[Any] = [{"params": [each.scale], "lr": 0.2}, {"params": _trained(each, "Muon")}]
        optimizer = optim.Adafactor(groups, lr=0.1)
        schedule = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        if each is model:
            whole_step(optimizer)
        for seed in range(3):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))  # the same on all ranks
            each(batch).square().mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    for key, value in full_tensors(model):
        torch.testing.assert_close(value, reference.state_dict()[key], rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("full", [False, True])
@on_ranks()
def test_state_is_saved_and_loaded(*, full: bool) -> None:
    """As it is, or as full tensors, which the state of a single process has."""
    model, optimizer = _optimized(_sharded())
    _step((model, optimizer))
    again, resumed = _optimized(_sharded())
    again.load_state_dict(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    resumed.load_state_dict(tree_map(whole, state) if full else state)
    _step((model, optimizer), (again, resumed))
    _assert_equal(again, model)


def test_what_is_not_known_to_update_parameters_one_by_one_is_refused() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    with pytest.raises(ConfigError, match=r"not known to update each parameter independently(.|\n)*Adafactor, Muon"):
        whole_step(Lamb(parameters))
    with pytest.raises(ConfigError, match="LBFGS is not known"):
        whole_step(optim.LBFGS(parameters))
    with pytest.raises(ConfigError, match="not known to update each element"):
        flat_step(whole_step(optim.Adafactor(parameters)))


@on_ranks()
def test_groups_count_a_step_once() -> None:
    """Two groups: one of a sharded parameter and one that is not, and one of sharded parameters alone."""
    model, reference = _sharded(), _made()
    for each in (model, reference):
        groups: list[Any] = [{"params": [each.scale, each.up.weight]}, {"params": [each.up.bias, each.down.weight]}]
        optimizer = Counting([{**group, "count": torch.zeros(())} for group in groups])
        held = [group["count"] for group in optimizer.param_groups]
        if each is model:
            whole_step(optimizer, per_parameter=True)
        _step((each, optimizer), steps=3)
        assert [count.item() for count in held] == [3, 3]
        assert all(group["count"] is count for group, count in zip(optimizer.param_groups, held, strict=True))
        assert [group["steps"] for group in optimizer.param_groups] == [3, 3]
    _assert_equal(model, reference)


@on_ranks()
def test_groups_that_depend_on_several_parameters_are_refused() -> None:
    model = _sharded()
    by_parameter = whole_step(Counting(_trained(model), elements=True), per_parameter=True)
    several = r"Counting writes 'count' into its group(.|\n)*depends only on that parameter"
    with pytest.raises(ConfigError, match=several):
        _step((model, by_parameter))
    by_group = whole_step(Counting([{"params": [p]} for p in _trained(model, "Muon")]), per_parameter=True)
    with pytest.raises(ConfigError, match="writes into 'count', one tensor of several groups"):
        _step((model, by_group))


@on_ranks()
def test_each_matrix_is_updated_once_in_the_world_and_what_is_not_sharded_on_each_rank() -> None:
    model, optimizer = _optimized(_sharded())
    updated = _updated(optimizer)
    _step((model, optimizer), steps=2)
    sharded = [p for p in _trained(model) if isinstance(p, DTensor)]
    assert sum(p is model.scale for p in updated) == 2
    count = torch.tensor([len(updated) - 2])  # without the one that is not sharded
    assert count < 2 * len(sharded)
    dist.all_reduce(count)
    assert count == 2 * len(sharded)


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
    matrices, own = _trained(model, "Muon"), torch.Size((2, 13))
    optimizer = whole_step(optim.Muon(matrices, lr=0.1), cost=lambda shape: 100.0 if shape == own else 1.0)
    updated = _updated(optimizer)
    _step((model, optimizer))
    shapes = [p.shape for p in updated]
    assert shapes == [own] if own in shapes else len(shapes) == len(matrices) - 1


@pytest.mark.long
@pytest.mark.parametrize("fails", [False, True])
@on_ranks(world_size=4, timeout_s=60)
def test_two_meshes_of_which_ranks_train_different_parts(*, fails: bool) -> None:
    """Ranks 2 and 3 do not train what they have on the smaller mesh."""
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"part": nn.Linear(6, 8, bias=False), "rest": nn.Linear(6, 8, bias=False)})
    reference = copy.deepcopy(model)
    fully_shard(model["part"], mesh=mesh_of((2, 2))["shard"])
    fully_shard(model["rest"])
    optimizer, skip = _optimized(model)[1], {0: "part.weight" if dist.get_rank() > 1 else ""}
    if fails:
        if dist.get_rank() == 0:
            optimizer.register_step_pre_hook(_fail)
        with pytest.raises(KeyError if dist.get_rank() == 0 else RankFailedError, match="no such thing"):
            _step((model, optimizer), skip=skip)
        return
    _step((model, optimizer), (reference, OPTIMIZERS["Adafactor"](reference.parameters())), skip=skip)
    _assert_equal(model, reference)


@on_ranks()
def test_ranks_that_list_parameters_in_other_orders() -> None:
    (model, _), theirs = _pair()
    optimizer = whole_step(OPTIMIZERS["Adafactor"](_trained(model)[:: -1 if dist.get_rank() else 1]))
    _step((model, optimizer), theirs, steps=2)
    _assert_equal(model, theirs[0])


@on_ranks()
def test_a_scaler_leaves_out_a_step_whose_gradients_are_not_finite() -> None:
    sides = _pair()
    for model, optimizer in sides:
        scaler = GradScaler("cpu", init_scale=4.0)
        for seed in range(3):
            _set_gradients(model, seed)
            scaler.scale(torch.ones(()))
            if seed == 1:
                for parameter in _trained(model):
                    local(parameter.grad).fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0
    _assert_equal(sides[0][0], sides[1][0])


@on_ranks()
def test_elementwise_groups_are_updated_on_shards() -> None:
    model, reference = _sharded(), _made()
    for each in (model, reference):
        groups = [{"params": _trained(each, "Muon"), "plain": False}]
        groups += [{"params": [p for p in _trained(each) if p.dim() != 2], "plain": True}]
        optimizer = Mixed(groups)
        if each is model:
            whole_step(optimizer, per_parameter=True, elementwise=lambda group: group["plain"])
            updated = _updated(optimizer)
        _step((each, optimizer), steps=3)
        if each is model:
            assert all(p.shape != model.up.bias.shape for p in updated)
            assert isinstance(optimizer.state[model.up.bias]["sum"], DTensor)
    _assert_equal(model, reference)


@on_ranks()
def test_an_update_that_fails_on_one_rank_is_an_error_on_all_and_leaves_the_optimizer_as_it_was() -> None:
    model = _sharded()
    optimizer = OPTIMIZERS["Muon"](_trained(model, "Muon"))
    groups, given, state = optimizer.param_groups, optimizer.param_groups[0]["params"], optimizer.state
    whole_step(optimizer)
    if dist.get_rank() == 1:
        optimizer.register_step_pre_hook(_fail)
        refused: Any = pytest.raises(KeyError, match="no such thing")
    else:
        refused = pytest.raises(RankFailedError, match=r"rank 1 failed in its update: KeyError: .*no such thing")
    with refused:
        _step((model, optimizer))
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0]["params"] is given
    assert optimizer.state is state


def _resumed(folder: str, *, saves: bool) -> dict[str, torch.Tensor]:
    """The values after three steps: with a save after two of them, or with a load in their place."""
    model, optimizer = _optimized(_sharded((dist.get_world_size(),)), "Shampoo")
    if saves:
        _step((model, optimizer), steps=2)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    if saves:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    _step((model, optimizer))
    return {key: value.clone() for key, value in full_tensors(model)}


@pytest.mark.long
def test_state_of_any_shape_is_resumed_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    expected = run_ranks(_resumed, str(tmp_path), world_size=4, saves=True)[0]
    for ranks in (2, 3):
        found = run_ranks(_resumed, str(tmp_path), world_size=ranks, saves=False)[0]
        for key, value in expected.items():
            assert torch.equal(found[key], value), key
