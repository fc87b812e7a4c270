"""Inside of `full_params`, modules hold what an unsharded model would hold."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_compile.errors import ConfigError, RankMismatchError
from fsdp_compile.state.full_params import full_params, full_tensors
from tests import long
from tests.fsdp2.models import batch, made, mesh_of, sharded
from tests.ranks import on_ranks
from tests.two_sides import whole


def _pair(shape: tuple[int, ...] = (2,)) -> tuple[Any, Any]:
    return sharded(shape=shape), made()


def _assert_shards_equal(model: nn.Module, reference: nn.Module) -> None:
    for (name, mine), (other, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert name == other
        assert isinstance(mine, DTensor) or name == "scale", name
        assert torch.equal(whole(mine), theirs), name


@long.parametrize("shape", [(1,), (2,), (2, 2)], always=[(2, 2)])
@on_ranks(world_size=lambda shape: torch.Size(shape).numel())
def test_everything_is_full_inside_and_what_was_written_is_kept(shape: tuple[int, ...]) -> None:
    model, reference = _pair(shape)
    model(batch())  # FSDP2 is initialized, and keeps the root unsharded
    before = {n: p for n, p in model.state_dict(keep_vars=True).items() if isinstance(p, DTensor)}
    hooks = [list(m._forward_pre_hooks.items()) for m in model.modules()]
    with full_params(model):
        shown = dict(model.named_parameters(remove_duplicate=False))
        for name, theirs in reference.named_parameters(remove_duplicate=False):
            assert type(shown[name]) is nn.Parameter
            assert torch.equal(shown[name], theirs), name
            assert shown[name].requires_grad == theirs.requires_grad
        assert model.last.weight is model.first.weight
        state = model.state_dict()
        assert state.keys() == reference.state_dict().keys()
        assert not any(isinstance(value, DTensor) for value in state.values())
        assert torch.equal(model(batch()), reference(batch())), "the plain forward"
        with torch.no_grad():
            for module in (model, reference):
                for i, parameter in enumerate(module.parameters()):
                    parameter.mul_(0.5).add_(i)
    assert all(p is before[n] for n, p in model.state_dict(keep_vars=True).items() if isinstance(p, DTensor))
    assert hooks == [list(m._forward_pre_hooks.items()) for m in model.modules()]
    _assert_shards_equal(model, reference)
    assert torch.equal(state["last.weight"], reference.last.weight), "taken inside, still there"
    torch.testing.assert_close(model(batch()), reference(batch()))
    with full_params(model, writeback=False), torch.no_grad():
        for parameter in model.parameters():
            if parameter is not model.scale:
                parameter.fill_(9)
    _assert_shards_equal(model, reference)
    new = {name: value + 1 for name, value in reference.state_dict().items()}
    with full_params(model):
        model.load_state_dict(new)
    reference.load_state_dict(new)
    _assert_shards_equal(model, reference)
    torch.testing.assert_close(model(batch()), reference(batch()))


Change = Callable[[Any, torch.Tensor], object]
KEPT: list[Change] = [
    lambda model, new: setattr(model.first, "weight", nn.Parameter(new)),
    lambda model, new: setattr(model.last, "weight", nn.Parameter(new)),
    lambda model, new: model.load_state_dict(
        {"first.weight": new, "last.weight": new.clone()}, strict=False, assign=True
    ),
]
REFUSED: dict[str, Change] = {
    "different parameters": lambda model, new: model.load_state_dict(
        {"first.weight": new, "last.weight": -new}, strict=False, assign=True
    ),
    "removed": lambda model, _: delattr(model.last, "weight"),
    r"another shape, torch.Size\(\[[56], 5\]\)": lambda model, _: setattr(
        model.last, "weight", nn.Parameter(torch.ones(5 + dist.get_rank(), 5))
    ),
    "another requires_grad, False": lambda model, _: model.first.weight.requires_grad_(requires_grad=False),
    r"another dtype, torch\.float64": lambda model, new: setattr(model.first, "weight", nn.Parameter(new.double())),
    "another is_meta, True": lambda model, new: setattr(model.first, "weight", nn.Parameter(new.to("meta"))),
}


@on_ranks(timeout_s=60)
def test_a_change_at_any_place_of_a_tied_parameter_counts_or_is_refused_on_all_ranks() -> None:
    new = torch.full((6, 6), 7.0)
    new[0] = torch.nan
    for change, assigns in itertools.product(KEPT, (False, True)):
        model, _ = _pair()
        if assigns:  # each place has a parameter of its own then
            model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        with full_params(model):
            change(model, new)
        assert model.last.weight is model.first.weight
        torch.testing.assert_close(whole(model.first.weight), new, rtol=0, atol=0, equal_nan=True)
    for what, wrong in REFUSED.items():
        for rank0_only in (False, True):
            for ranks in ((0,), (0,) if rank0_only else (0, 1)):
                model, reference = _pair()
                order = list(dict(model.named_parameters()))
                with pytest.raises(ConfigError, match=what), full_params(model, rank0_only=rank0_only):  # noqa: PT012
                    if dist.get_rank() in ranks:
                        wrong(model, new)
                    with torch.no_grad():
                        model.blocks[1].up.bias.add_(1)
                with torch.no_grad():
                    reference.blocks[1].up.bias.add_(1)
                if not rank0_only:
                    _assert_shards_equal(model, reference)  # with what can be kept
                assert list(dict(model.named_parameters())) == order


@pytest.mark.parametrize("where", ["full_params", "full_tensors"])
@on_ranks(timeout_s=60)
def test_what_ranks_have_replaced_otherwise_is_refused_on_all_of_them(where: str) -> None:
    """By ranks in different modules, or by one alone: they would gather different parameters together."""
    for ranks in ((0, 1), (0,)):
        model = sharded()
        rank = dist.get_rank()
        if rank in ranks:
            model.blocks[rank].up.weight = nn.Parameter(torch.ones(9, 9))
        with pytest.raises(RankMismatchError, match="different parameters in a sharded model") as caught:  # noqa: PT012
            if where == "full_params":
                with full_params(model):
                    pass
            else:
                next(full_tensors(model))
        if rank:
            assert "blocks.0.up.weight is a DTensor" in str(caught.value)
            assert "on the first rank a Parameter (9, 9) of torch.float32" in str(caught.value)
    model = sharded()
    model.blocks[0].up.weight = nn.Parameter(torch.ones(9, 9))  # on all ranks: it is left as it is
    with full_params(model):
        assert model.blocks[0].up.weight.shape == (9, 9)
        assert type(model.blocks[1].up.weight) is nn.Parameter


@on_ranks(world_size=4, timeout_s=60)
def test_ranks_of_another_mesh_do_not_wait_for_those_that_differ() -> None:
    """Ranks 0 and 1 differ on a mesh of theirs; 2 and 3 share another one with them."""
    parts: Any = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    fully_shard(parts[0], mesh=mesh_of((2, 2))["shard"])
    fully_shard(parts[1], mesh=mesh_of((4,)))
    if dist.get_rank() == 0:
        parts[0].weight = nn.Parameter(torch.ones(9, 9))
    says = "ranks have different" if dist.get_rank() < 2 else "other ranks have different"
    with pytest.raises(RankMismatchError, match=f"{says} parameters in a sharded model"):
        next(full_tensors(parts))


@on_ranks()
def test_each_rank_keeps_its_own_part_and_attributes_are_kept() -> None:
    model: Any = fully_shard(nn.Linear(3, 4))
    model.weight.tag, model.weight.gone = "before", 1
    with full_params(model), torch.no_grad():
        model.weight.tag, model.weight.new = "inside", [2]
        del model.weight.gone
        model.weight.fill_(dist.get_rank())
        model.bias = nn.Parameter(torch.arange(4.0))
        model.bias.new = 3
    assert (model.weight.tag, model.weight.new, model.bias.new) == ("inside", [2], 3)
    assert not hasattr(model.weight, "gone")
    assert whole(model.weight)[:, 0].tolist() == [0, 0, 1, 1], "each rank keeps its own rows"
    assert whole(model.bias).tolist() == [0, 1, 2, 3]
    with full_params(model, writeback=False):
        model.weight.tag = "dropped"
    assert model.weight.tag == "inside"


@long.parametrize("shape", [(2,), (2, 2)], always=[(2,)])
@on_ranks(world_size=lambda shape: torch.Size(shape).numel())
def test_the_first_rank_alone_can_hold_and_write(shape: tuple[int, ...]) -> None:
    model, reference = _pair(shape)
    for each in (model, reference):
        each(batch()).square().mean().backward()
    first = dist.get_rank() == 0
    with full_params(model, rank0_only=True, offload_to_cpu=True, with_grads=True), torch.no_grad():
        for name, mine in model.named_parameters():
            theirs = reference.get_parameter(name)
            assert isinstance(mine, DTensor) is not (first or name == "scale")
            if first and name != "scale":
                assert torch.equal(mine, theirs)
                assert (mine.grad is None) == (theirs.grad is None), name
                mine.add_(1)
                if mine.grad is not None:
                    mine.grad.mul_(2)
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if name == "scale":
            continue
        assert torch.equal(whole(mine), theirs + 1), name
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(whole(mine.grad), 2 * theirs.grad, msg=name)


@on_ranks()
def test_gradients_are_full_and_kept() -> None:
    model, reference = _pair()
    for each in (model, reference):
        each(batch()).square().mean().backward()
    model.last.bias.grad = None
    with full_params(model, with_grads=True):
        for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            if name == "last.bias" or theirs.grad is None:
                assert mine.grad is None, name
            else:
                torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
        model.last.bias.grad = torch.ones(6)
        model.blocks[0].up.weight.grad = None
        model.first.weight.grad.fill_(7)
    assert whole(model.last.bias.grad).tolist() == [1] * 6
    assert model.blocks[0].up.weight.grad is None
    assert (whole(model.first.weight.grad) == 7).all()
    with full_params(model, with_grads=True, writeback=False):
        model.first.weight.grad.fill_(8)
    assert (whole(model.first.weight.grad) == 7).all()
    if dist.get_rank() == 1:
        model.last.bias.grad = None
    with full_params(model, with_grads=True):  # zeros stand for the part that is missing
        assert model.last.bias.grad.tolist() == [1, 1, 1, 0, 0, 0]
    with pytest.warns(UserWarning, match="with_grads=True"), full_params(model):
        model(batch()).square().mean().backward()


@on_ranks(timeout_s=60)
def test_parts_of_a_model() -> None:
    model, reference = _pair()
    block, other = model.blocks
    model(batch())  # FSDP2 is initialized, which needs all parameters sharded
    with full_params(block):
        assert type(block.up.weight) is nn.Parameter
        assert isinstance(other.up.weight, DTensor)
        assert torch.equal(block(batch()), reference.blocks[0](batch()))
        with pytest.raises(ConfigError, match=r"full already"), full_params(model):
            pass
        with full_params(other.down):
            assert type(other.down.weight) is nn.Parameter
        torch.testing.assert_close(model(batch()), reference(batch()))
        assert type(block.up.weight) is nn.Parameter
    with full_params(model, recurse=False):
        kept = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
        assert kept == {name for name, _ in model.named_parameters() if name.startswith("blocks")}
    with full_params(model, rank0_only=True, writeback=False):
        if dist.get_rank() == 0:
            assert torch.equal(model(batch()), reference(batch())), "of one rank alone"
    with pytest.raises(ConfigError, match="sharded again"), full_params(model.last):
        model(batch()).sum().backward()
    _assert_shards_equal(model, reference)


class _Meddling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.meddles = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.meddles:
            with full_params(self.inner):
                return self.inner(x)
        return self.inner(x)


@on_ranks()
def test_wrong_uses_are_refused_and_exceptions_leave_shards() -> None:
    model: Any = _Meddling()
    fully_shard(model.inner)
    fully_shard(model)
    with pytest.raises(ConfigError, match=r"inside a step(.|\n)*in a forward"):
        model(torch.ones(2, 4))
    plain: Any = fully_shard(nn.Linear(4, 4))

    def hook(_: torch.Tensor) -> None:
        with full_params(plain):
            pass

    y = plain(torch.ones(2, 4, requires_grad=True))
    y.register_hook(hook)
    with pytest.raises(ConfigError, match="in a backward"):
        y.sum().backward()
    plain = fully_shard(nn.Linear(4, 4))
    weight = plain.weight
    with pytest.raises(KeyError), full_params(plain), torch.no_grad():  # noqa: PT012
        plain.weight.fill_(3)
        late, taken = plain(torch.ones(2, 4)), plain.weight
        raise KeyError
    assert plain.weight is weight
    assert (whole(plain.weight) == 3).all()
    assert taken.numel() == 0, "what was taken inside cannot be used by mistake"
    assert late.shape == (2, 4)
    with torch.device("meta"):
        meta: Any = fully_shard(nn.Linear(2, 2), mesh=copy.copy(weight.device_mesh))
    with pytest.raises(ConfigError, match="meta device"), full_params(meta):
        pass


@on_ranks()
def test_a_look_between_forward_and_backward_is_harmless() -> None:
    model, reference = _pair()
    losses = [each(batch()).square().mean() for each in (model, reference)]
    with full_params(model):
        norm = sum(p.norm() for p in model.parameters())
    assert torch.isfinite(norm)
    for loss in losses:
        loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        if theirs[1].grad is not None:
            torch.testing.assert_close(whole(mine.grad), theirs[1].grad, msg=name)


@on_ranks()
def test_hooks_of_several_modules_that_are_sharded_together_are_off_and_come_back() -> None:
    """One call of `fully_shard` on several modules, whose hooks are others; hooks of the user's own still run."""
    model, reference = made(), made()
    fully_shard([model.first, model.last])
    fully_shard(model, ignored_params={model.scale})
    seen: list[str] = []
    model.first.register_forward_hook(lambda *_: seen.append("own"))
    model(batch()).sum().backward()
    with full_params(model):
        assert torch.equal(model(batch()), reference(batch()))
        model.last.register_forward_pre_hook(lambda *_: seen.append("later"))
    assert seen == ["own", "own"]
    torch.testing.assert_close(model(batch()), reference(batch()))
    assert seen == ["own", "own", "own", "later"]
