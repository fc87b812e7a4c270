"""What a sharded model's parameters are: DTensors over one buffer, holding the rows that torch.chunk gives a rank."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_compile import ConfigError, fully_shard, units
from tests import long
from tests.fake_world import fake_world
from tests.models.outlines import Odd, Transformer
from tests.ranks import run_ranks


def _odd_pair() -> tuple[Odd, Odd]:
    torch.manual_seed(0)
    model = Odd()
    return model, copy.deepcopy(model)


def _dtensor(parameter: torch.Tensor) -> DTensor:
    assert isinstance(parameter, DTensor)
    assert isinstance(parameter, nn.Parameter)
    return parameter


def _assert_sharded(model: nn.Module, reference: nn.Module) -> None:
    """Placements, local rows and full values of every parameter, on a 1-D mesh and dimension 0."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for (name, mine), (_, full) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        parameter = _dtensor(mine)
        assert parameter.placements == ((Replicate() if full.dim() == 0 else Shard(0)),), name
        assert parameter.shape == full.shape
        assert parameter.requires_grad == full.requires_grad
        assert parameter.is_leaf
        chunks = full.detach().chunk(world) if full.dim() else [full.detach()] * world
        expected = chunks[rank] if rank < len(chunks) else full.detach()[:0]
        assert torch.equal(parameter.to_local().detach(), expected), name
        if full.dim():
            again = distribute_tensor(full.detach(), parameter.device_mesh, [Shard(0)])
            assert again.to_local().shape == parameter.to_local().shape, name
        assert torch.equal(parameter.full_tensor(), full), name


def _check_placements_and_rows() -> None:
    model, reference = _odd_pair()
    assert fully_shard(model) is model
    _assert_sharded(model, reference)
    assert list(model.state_dict()) == list(reference.state_dict())


@pytest.mark.core
@long.parametrize("world_size", [1, 2, 4], always=[4])
def test_placements_and_local_rows(world_size: int) -> None:
    run_ranks(_check_placements_and_rows, world_size=world_size)


def test_rows_of_the_last_of_sixteen_ranks() -> None:
    """Rank 15 of 16 holds nothing of a parameter of 13 rows, as torch.chunk has it."""
    for rank in (0, 12, 15):
        model, reference = _odd_pair()
        with fake_world(16, rank=rank):
            fully_shard(model)
            chunks = reference.uneven.weight.detach().chunk(16)
            local = _dtensor(model.uneven.weight).to_local()
            assert torch.equal(local, chunks[rank] if rank < len(chunks) else chunks[0][:0])


def _check_one_buffer_per_kind() -> None:
    model, _ = _odd_pair()
    fully_shard(model)
    (unit,) = units(model)
    kinds = {(flat.flat_param.dtype, flat.flat_param.requires_grad) for flat in unit.param_groups}
    assert kinds == {(torch.float32, True), (torch.float32, False), (torch.float64, True)}
    assert len(unit.param_groups) == 3
    sizes: list[int] = [flat.flat_param.numel() for flat in unit.param_groups]
    everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, sizes)
    assert everyone == [sizes] * len(everyone), "the same size on every rank"
    for flat in unit.param_groups:
        start = flat.flat_param.data_ptr()
        end = start + flat.flat_param.numel() * flat.flat_param.element_size()
        for slot in flat.params:
            local = _dtensor(slot.parameter).to_local()
            if local.numel() == 0:  # has no address
                continue
            assert start <= local.data_ptr() < end
            assert local.untyped_storage().data_ptr() == flat.flat_param.untyped_storage().data_ptr()
            assert local.data_ptr() % 128 == start % 128
    assert unit.full_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert unit.shard_bytes == sum(
        flat.flat_param.numel() * flat.flat_param.element_size() for flat in unit.param_groups
    )


def test_views_of_one_flat_buffer_per_dtype_and_trainability() -> None:
    run_ranks(_check_one_buffer_per_kind, world_size=4)


def _check_writes_are_seen() -> None:
    """The buffer is what is gathered, the parameter is what users write to: they are the same memory."""
    model, reference = _odd_pair()
    fully_shard(model)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            mine.add_(1.0)
            theirs.add_(1.0)
    x = torch.randn(4, 10)
    assert torch.equal(model(x), reference(x))


def test_in_place_writes_reach_the_next_forward() -> None:
    run_ranks(_check_writes_are_seen, world_size=2)


class _Columns(nn.Module):
    """A weight for each dimension to shard on."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(5, 8))
        self.columns = nn.Parameter(torch.randn(3, 8))
        self.last = nn.Parameter(torch.randn(2, 3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.rows.T).sum() + (x @ self.columns.T).square().sum() + self.last.sum(1).square().sum()


def _check_other_dimensions() -> None:
    torch.manual_seed(0)
    model = _Columns()
    reference = copy.deepcopy(model)
    chosen = {8 * 3: Shard(1), 24: Shard(-1)}
    fully_shard(model, shard_placement_fn=lambda p: Shard(-1) if p.dim() == 3 else chosen.get(p.numel()))
    expected = {"rows": 0, "columns": 1, "last": 2}
    for name, full in reference.named_parameters():
        mine = _dtensor(getattr(model, name))
        assert mine.placements == (Shard(expected[name]),)
        again = distribute_tensor(full.detach(), mine.device_mesh, mine.placements)
        assert torch.equal(mine.to_local().detach(), again.to_local()), name
    x = torch.randn(4, 8)
    loss, theirs = model(x), reference(x)
    torch.testing.assert_close(loss, theirs)
    loss.backward()
    theirs.backward()
    for name, full in reference.named_parameters():
        gradient = getattr(model, name).grad
        assert gradient.placements == (Shard(expected[name]),)
        torch.testing.assert_close(gradient.full_tensor(), full.grad, msg=name)


@pytest.mark.long
def test_shard_placement_fn_chooses_the_dimension() -> None:
    run_ranks(_check_other_dimensions, world_size=2)
    run_ranks(_check_other_dimensions, world_size=4)


def test_another_dimension_must_divide() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    before = list(model.parameters())
    with fake_world(4), pytest.raises(ConfigError) as caught:
        fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    assert "dimension 1 of size 6 does not divide over 4 ranks" in str(caught.value)
    assert "0.weight" in str(caught.value)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True)), "nothing was touched"


def _check_two_dimensions() -> None:
    model, reference = _odd_pair()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    for (name, mine), (_, full) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        parameter = _dtensor(mine)
        inner = Replicate() if full.dim() == 0 else Shard(0)
        assert parameter.placements == (Replicate(), inner), name
        again = distribute_tensor(full.detach(), mesh, parameter.placements)
        assert torch.equal(parameter.to_local().detach(), again.to_local()), name
        assert torch.equal(parameter.full_tensor(), full), name
    batch = torch.randn(8, 10, generator=torch.Generator().manual_seed(1))
    model(batch.chunk(4)[dist.get_rank()]).square().mean().backward()
    reference(batch).square().mean().backward()
    for (name, mine), (_, full) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (mine.grad is None) == (full.grad is None), name
        if full.grad is not None:
            torch.testing.assert_close(_gradient(mine).full_tensor(), full.grad, msg=name)


def _gradient(parameter: torch.Tensor) -> DTensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad


@pytest.mark.core
def test_a_mesh_of_two_dimensions_replicates_over_the_first() -> None:
    run_ranks(_check_two_dimensions, world_size=4)


def _check_marks_and_hooks() -> None:
    model, reference = _odd_pair()
    seen: dict[str, list[torch.Tensor]] = {"mine": [], "theirs": [], "after": []}
    model.uneven.weight.no_decay = True  # type: ignore[attr-defined]
    model.frozen.requires_grad_()
    model.frozen.register_hook(lambda g: g)
    model.frozen.requires_grad_(False)  # noqa: FBT003

    def double(key: str):  # type: ignore[no-untyped-def]  # noqa: ANN202
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            seen[key].append(gradient)
            return 2 * gradient

        return hook

    model.uneven.weight.register_hook(double("mine"))
    reference.uneven.weight.register_hook(double("theirs"))
    model.few.weight.register_post_accumulate_grad_hook(seen["after"].append)
    fully_shard(model)
    assert model.uneven.weight.no_decay  # type: ignore[attr-defined]
    assert model.frozen.requires_grad is False
    model.few.bias.register_hook(lambda g: g * 0)
    x = torch.randn(4, 10)
    model(x).square().mean().backward()
    reference(x).square().mean().backward()
    assert [type(g) for g in seen["mine"]] == [DTensor]
    torch.testing.assert_close(seen["mine"][0].full_tensor(), seen["theirs"][0])  # type: ignore[attr-defined]
    torch.testing.assert_close(_gradient(model.uneven.weight).full_tensor(), reference.uneven.weight.grad)
    assert seen["after"] == [model.few.weight]
    assert not _gradient(model.few.bias).full_tensor().any(), "a hook registered after sharding"


def test_attributes_and_gradient_hooks_survive() -> None:
    run_ranks(_check_marks_and_hooks, world_size=2)


def _check_tied() -> None:
    torch.manual_seed(0)
    model = Transformer(tied=True)
    reference = copy.deepcopy(model)
    fully_shard(model)
    assert model.head.weight is model.embed.weight
    assert list(model.state_dict()) == list(reference.state_dict())
    assert len(list(model.parameters())) == len(list(reference.parameters()))
    _assert_sharded(model, reference)
    held = sum(unit.full_bytes for unit in units(model))
    assert held == sum(p.numel() * p.element_size() for p in reference.parameters()), "stored once"


def test_tied_parameters_stay_one_parameter() -> None:
    run_ranks(_check_tied, world_size=2)


def _check_strides() -> None:
    """Parameters that are not contiguous in memory: a transposed matrix, a channels-last convolution."""
    torch.manual_seed(0)
    linear, convolution = nn.Linear(6, 5), nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    linear.weight = nn.Parameter(torch.randn(6, 5).T)
    model = nn.ModuleDict({"linear": linear, "convolution": convolution})
    reference = copy.deepcopy(model)
    for part in model.values():
        fully_shard(part)
    _assert_sharded(model, reference)
    x, image = torch.randn(2, 6), torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(linear(x), reference["linear"](x))
    torch.testing.assert_close(convolution(image), reference["convolution"](image))


def test_parameters_of_any_strides() -> None:
    run_ranks(_check_strides, world_size=2)
