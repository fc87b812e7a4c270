"""Outputs of a compiled model that the loss does not use: None, as in eager, where torch.compile makes zeros."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, fully_shard, no_sync, step_in_backward
from tests.beside import close, compile_eagerly, loss_of
from tests.ranks import run_ranks

Outputs = tuple[torch.Tensor, torch.Tensor | None]


class Heads(nn.Module):
    """A trunk and two heads, each of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, *, right: bool = True) -> Outputs:
        hidden = torch.tanh(self.trunk(x))
        return self.left(hidden), self.right(hidden) if right else None


def _models() -> tuple[Heads, Heads, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = Heads()
    batch = torch.randn(4, 6)
    return model, copy.deepcopy(model), batch, batch.chunk(2)[dist.get_rank()]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad if p.grad is None else _whole(p.grad) for name, p in model.named_parameters()}


def _compare(model: nn.Module, reference: nn.Module) -> None:
    expected = _gradients(reference)
    for name, gradient in _gradients(model).items():
        assert (gradient is None) == (expected[name] is None), name
        if gradient is not None:
            close(gradient, expected[name], name)


def _loss(*outputs: torch.Tensor | None) -> torch.Tensor:
    return torch.stack([loss_of(each) for each in outputs if each is not None]).sum()


def _one_unused(lower: str) -> None:
    model, reference, batch, mine = _models()
    compiled = torch.compile(model, backend="fsdp", options={"lower": lower})
    optimizers = [torch.optim.AdamW(each.parameters(), weight_decay=0.1) for each in (model, reference)]
    for used in (slice(0, 2), slice(0, 1), slice(0, 1), slice(0, 2)):
        _loss(*compiled(mine)[used]).backward()
        _loss(*reference(batch)[used]).backward()
        _compare(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        close(_whole(parameter), expected, "parameters")


@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_head_whose_output_is_unused_has_none_as_in_one_process(lower: str) -> None:
    run_ranks(_one_unused, lower)


def _penalty(model: nn.Module) -> torch.Tensor:
    """Outside of the forward, as docs/limits.md says to write it; the right head's bias is not in it."""
    penalty = torch.stack([p.square().sum() for n, p in model.named_parameters() if n != "right.bias"]).sum()
    return _whole(penalty)


def _penalized() -> None:
    model, reference, batch, mine = _models()
    compiled = compile_eagerly(fully_shard(model))
    for is_before in (True, False, True):
        model.zero_grad()
        reference.zero_grad()
        for each, call, x in ((model, compiled, mine), (reference, reference, batch)):
            before = _penalty(each)
            loss = _loss(call(x)[0])
            (loss + (before if is_before else _penalty(each))).backward()
        _compare(model, reference)
        assert model.right.weight.grad is not None
        assert model.right.bias.grad is None


def test_a_penalty_outside_of_the_forward_counts_for_an_unused_head() -> None:
    run_ranks(_penalized)


def _of_changing_sizes() -> None:
    model, reference, _, _ = _models()
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"}, dynamic=True)
    for rows in (4, 6, 10):
        batch = torch.randn(rows, 6)
        mine = batch.chunk(2)[dist.get_rank()]
        for outputs, expected in ((compiled(mine), reference(batch)), (compiled(mine)[:1], reference(batch)[:1])):
            model.zero_grad()
            reference.zero_grad()
            _loss(*outputs).backward()
            _loss(*expected).backward()
            _compare(model, reference)


def test_with_changing_sizes() -> None:
    run_ranks(_of_changing_sizes)


def _accumulated(first: slice, second: slice) -> None:
    model, reference, batch, mine = _models()
    compiled = compile_eagerly(model)
    for _ in range(2):  # the second step's graph has accumulated gradients among its inputs
        with no_sync(model):
            _loss(*compiled(mine)[first]).backward()
        _loss(*compiled(mine)[second]).backward()
        _loss(*reference(batch)[first]).backward()
        _loss(*reference(batch)[second]).backward()
        _compare(model, reference)
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize(
    ("first", "second"), [(slice(0, 2), slice(0, 1)), (slice(0, 1), slice(0, 2)), (slice(0, 1), slice(0, 1))]
)
def test_accumulated_gradients_of_an_output_count_when_it_is_used_no_more(first: slice, second: slice) -> None:
    run_ranks(_accumulated, first, second)


def _updated_in_backward(used: int, *, unused_is_plain: bool) -> None:
    """Units are updated one after the other, and ranks compare before the first of these updates alone."""
    model, reference, batch, mine = _models()
    for module in (model.left, model.right, model):
        fully_shard(module)
    unused = model.left if used else model.right
    own = list(unused.parameters()) if unused_is_plain else []
    names = {id(p) for p in own}
    step_in_backward(torch.optim.AdamW([p for p in model.parameters() if id(p) not in names], weight_decay=0.1))
    optimizers = [torch.optim.AdamW(reference.parameters(), weight_decay=0.1)]
    optimizers += [torch.optim.AdamW(own, weight_decay=0.1)] if own else []
    compiled = compile_eagerly(model)
    for taken in (slice(0, 2), slice(used, used + 1), slice(used, used + 1)):
        _loss(*compiled(mine)[taken]).backward()
        _loss(*reference(batch)[taken]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            close(_whole(parameter), expected, name)


@pytest.mark.parametrize("unused_is_plain", [False, True])
@pytest.mark.parametrize("used", [0, 1])
def test_updates_in_backward_leave_it_alone(used: int, unused_is_plain: bool) -> None:  # noqa: FBT001
    run_ranks(_updated_in_backward, used, unused_is_plain=unused_is_plain)


def _updated_for_other_losses() -> None:
    model, reference, batch, mine = _models()
    for module in (model.left, model.right, model):
        fully_shard(module)
    step_in_backward(torch.optim.AdamW(model.parameters(), weight_decay=0.1))
    optimizer = torch.optim.AdamW(reference.parameters(), weight_decay=0.1)
    compiled = compile_eagerly(model)
    for used in ((0, 0), (0, 1), (1, 1), (1, 0)):  # by each of the two ranks
        loss_of(compiled(mine)[used[dist.get_rank()]]).backward()
        losses = [loss_of(reference(rows)[output]) for rows, output in zip(batch.chunk(2), used, strict=True)]
        (torch.stack(losses).sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            close(_whole(parameter), expected, name)


def test_what_no_rank_used_in_a_step_may_be_used_by_one_in_the_next() -> None:
    run_ranks(_updated_for_other_losses)


class ThreeHeads(Heads):
    """A third head."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        hidden = torch.tanh(self.trunk(x))
        return self.middle(hidden), self.left(hidden), self.right(hidden)


def _two_unused_in_two_ways(used: int) -> None:
    torch.manual_seed(0)
    model = ThreeHeads()
    reference, batch = copy.deepcopy(model), torch.randn(4, 6)
    for module in (model.left, model.right, model.middle, model):
        fully_shard(module)
    in_backward = [p for name, p in model.named_parameters() if "right" not in name]
    step_in_backward(torch.optim.AdamW(in_backward, weight_decay=0.1))
    after = torch.optim.AdamW(model.right.parameters(), weight_decay=0.1)
    optimizer = torch.optim.AdamW(reference.parameters(), weight_decay=0.1)
    compiled = compile_eagerly(model)
    for outputs in (slice(0, 3), *[slice(used, used + 1)] * 3):
        _loss(*compiled(batch.chunk(2)[dist.get_rank()])[outputs]).backward()
        _loss(*reference(batch)[outputs]).backward()
        for each in (after, optimizer):
            each.step()
            each.zero_grad()
        for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            close(_whole(parameter), expected, name)


@pytest.mark.parametrize("used", [0, 1])
def test_one_that_is_updated_in_backward_beside_one_that_is_not(used: int) -> None:
    run_ranks(_two_unused_in_two_ways, used)


def _on_two_meshes(used: int) -> None:
    torch.manual_seed(0)
    model = Heads()
    reference, batch = copy.deepcopy(model), torch.randn(8, 6)
    fully_shard(model.right, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp")))
    everyone = init_device_mesh("cpu", (4,))
    fully_shard(model.left, mesh=everyone)
    fully_shard(model, mesh=everyone)
    _loss(compile_eagerly(model)(batch.chunk(4)[dist.get_rank()])[used]).backward()
    _loss(reference(batch)[used]).backward()
    _compare(model, reference)


@pytest.mark.parametrize("used", [0, pytest.param(1, marks=pytest.mark.long)])
def test_units_on_two_meshes(used: int) -> None:
    run_ranks(_on_two_meshes, used, world_size=4)


def _after_a_gradient_of_inputs() -> None:
    model, reference, batch, mine = _models()
    compiled = compile_eagerly(model)
    inputs = mine.clone().requires_grad_()
    torch.autograd.grad(_loss(*compiled(inputs)), inputs)  # of both outputs, and written nowhere
    loss_of(compiled(mine)[0]).backward()
    loss_of(reference(batch)[0]).backward()
    _compare(model, reference)


def test_after_a_gradient_of_inputs() -> None:
    run_ranks(_after_a_gradient_of_inputs)


def _second_backward() -> None:
    model, reference, batch, mine = _models()
    outputs, expected = compile_eagerly(model)(mine), reference(batch)
    for first, second in zip(outputs, expected, strict=True):
        loss_of(first).backward(retain_graph=True)
        loss_of(second).backward(retain_graph=True)
        _compare(model, reference)


def test_a_second_backward_through_the_same_graph_for_the_other_output() -> None:
    run_ranks(_second_backward)


def _of_inputs() -> None:
    model, reference, batch, _ = _models()
    for each in (model, reference):
        each.requires_grad_(requires_grad=False)
    batches = [batch.clone().requires_grad_(), batch.clone().requires_grad_()]
    mine, other = batches
    loss_of(compile_eagerly(model)(mine)[0]).backward()
    loss_of(reference(other)[0]).backward()
    assert mine.grad is not None
    assert other.grad is not None
    close(mine.grad, other.grad, "gradient of the input")


def test_a_frozen_model_with_an_unused_output() -> None:
    run_ranks(_of_inputs)


@torch.compile(backend="aot_eager")
def _before(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return weight * x, weight + x


class PassesOn(Heads):
    """Returns a view of its input, too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        hidden = torch.tanh(self.trunk(x))
        return x.view(-1), self.left(hidden), self.right(hidden)


def _after_another_graph() -> None:
    torch.manual_seed(0)
    model = PassesOn()
    reference, batch = copy.deepcopy(model), torch.randn(4, 6)
    weights = torch.ones(6, requires_grad=True), torch.ones(6, requires_grad=True)
    for call, weight in zip((compile_eagerly(model), reference), weights, strict=True):
        outputs = call(_before(weight, batch)[0])
        (outputs[0].mean() + loss_of(outputs[1])).backward()
    assert weights[0].grad is not None
    close(weights[0].grad, weights[1].grad, "gradient of what came before")
    _compare(model, reference)


def test_a_graph_of_another_backend_before_it_gets_zeros() -> None:
    """It has an output that is not used either, and its backward does not know `None`."""
    run_ranks(_after_another_graph)


def _left_out() -> None:
    model, reference, batch, mine = _models()
    fsdp2 = copy.deepcopy(reference)
    torch_fully_shard(fsdp2)
    loss_of(compile_eagerly(model)(mine, right=False)[0]).backward()
    loss_of(fsdp2(mine)[0]).backward()
    loss_of(reference(batch)[0]).backward()
    assert reference.right.weight.grad is None
    _compare(model, reference)
    _compare(fsdp2, reference)


def test_a_head_that_the_forward_leaves_out_has_none_as_in_one_process() -> None:
    run_ranks(_left_out)


class OwnOrder(Heads):
    """Computes alike on all ranks, and returns `first` first; rank 0 alone returns the trunk's output, too."""

    first = "left"

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:  # type: ignore[override]
        hidden = torch.tanh(self.trunk(x))
        heads = {"left": self.left(hidden), "right": self.right(hidden)}
        more = [hidden] if dist.get_rank() == 0 else []
        return [heads.pop(self.first), *heads.values(), *more]


def _other_outputs(firsts: tuple[str, str]) -> None:
    torch.manual_seed(0)
    model = OwnOrder()
    model.first = firsts[dist.get_rank()]
    reference, batch = copy.deepcopy(model), torch.randn(4, 6)
    loss_of(compile_eagerly(model)(batch.chunk(2)[dist.get_rank()])[0]).backward()
    losses = []
    for first, mine in zip(firsts, batch.chunk(2), strict=True):
        reference.first = first
        losses.append(loss_of(reference(mine)[0]))
    (torch.stack(losses).sum() / 2).backward()
    _compare(model, reference)


@pytest.mark.parametrize("firsts", [("left", "right"), ("left", "left")])
def test_ranks_may_return_other_outputs_in_another_order(firsts: tuple[str, str]) -> None:
    run_ranks(_other_outputs, firsts)


def _uneven() -> None:
    model, reference, batch, _ = _models()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "fsdp")))
    compiled = compile_eagerly(model)
    with no_sync(model):
        for _ in range(1 + dist.get_rank()):
            loss_of(compiled(batch)[0]).backward()
    loss_of(compiled(batch)[0]).backward()
    for _ in range(5):  # two of rank 0 and three of rank 1
        (loss_of(reference(batch)[0]) / 2).backward()
    assert reference.right.weight.grad is None
    _compare(model, reference)


def test_replicas_that_accumulate_fewer_microbatches_than_others() -> None:
    run_ranks(_uneven)


class TwoInputs(nn.Module):
    """Two layers, each with an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(y)


def _hooked() -> None:
    batch = torch.randn(4, 6, requires_grad=True)
    other = batch * 1
    seen: list[torch.Tensor] = []
    other.register_hook(lambda gradient: seen.append(2 * gradient))
    compiled = compile_eagerly(TwoInputs())
    loss_of(compiled(batch, other)[0]).backward()
    assert [each.any().item() for each in seen] == [False]
    assert batch.grad is not None


def test_a_hook_on_an_input_of_an_unused_output_gets_zeros() -> None:
    run_ranks(_hooked)


def _one_each(replicas: int) -> None:
    torch.manual_seed(0)
    model, ranks = Heads(), dist.get_world_size()
    reference, batch = copy.deepcopy(model), torch.randn(2 * ranks, 6)
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("dp_replicate", "fsdp"))
        fully_shard(model, mesh=mesh)
    uses_right = dist.get_rank() == ranks - 1
    loss_of(compile_eagerly(model)(batch.chunk(ranks)[dist.get_rank()])[int(uses_right)]).backward()
    left, right = reference(batch)
    losses = [loss_of(each) for each in (*left.chunk(ranks)[:-1], right.chunk(ranks)[-1])]
    (torch.stack(losses).sum() / ranks).backward()
    _compare(model, reference)


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.long)])
def test_ranks_that_use_one_output_each_get_the_gradients_of_all(ranks: int, replicas: int) -> None:
    """Why a rank whose own loss leaves an output out must not have None: others have gradients for it."""
    run_ranks(_one_each, replicas, world_size=ranks)


class _Expert(Heads):
    """Heads behind an expert that is on another mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        hidden = torch.tanh(self.expert(torch.tanh(self.trunk(x))))
        return self.left(hidden), self.right(hidden)


def _beside_another_mesh() -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "fsdp"))
    model = _Expert()
    fully_shard([model.left, model.right], mesh=mesh)
    fully_shard(model.expert, mesh=mesh["dp_replicate"], sharding_strategy=ShardingStrategy.NO_SHARD)
    compiled = compile_eagerly(fully_shard(model, mesh=mesh))
    _loss(*compiled(torch.ones(2, 6))[: 1 + dist.get_rank() // 2]).backward()
    return model.right.weight.grad is not None


def test_replicas_of_units_on_other_meshes_agree() -> None:
    """Units that share their replicas, and not their shard group, are not taken for each other."""
    assert run_ranks(_beside_another_mesh, world_size=4) == [True] * 4


def _penalized_before() -> None:
    model, _, _, mine = _models()
    penalty = _penalty(model)
    loss = _loss(*compile_eagerly(model)(mine))
    with pytest.raises(ConfigError, match="from before the model was sharded"):
        (loss + penalty).backward()


def test_a_penalty_of_plain_parameters_is_refused_once_they_are_sharded() -> None:
    run_ranks(_penalized_before)
