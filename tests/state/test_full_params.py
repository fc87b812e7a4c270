"""Inside of `full_params`, modules hold what an unsharded model would hold."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, MixedPrecision, full_params, fully_shard, units
from fsdp_compile.comm import exchange
from fsdp_compile.layout.spec import UnshardSpec
from fsdp_compile.state import full_params as full_params_file
from tests import long
from tests.models.meta import Tied, tokens
from tests.ranks import run_ranks


def _pair(shape: tuple[int, ...] = (2,), **kwargs: Any) -> tuple[Any, Any]:
    """A sharded model and an equal unsharded one, with gradients."""
    torch.manual_seed(0)
    reference = Tied()
    model = copy.deepcopy(reference)
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names), **kwargs)
    return model, reference


def _backward(*models: Any) -> None:
    for model in models:
        model(tokens()).square().mean().backward()


def _assert_shards_equal(model: nn.Module, reference: nn.Module) -> None:
    for (name, mine), (other, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert name == other
        assert isinstance(mine, DTensor), name
        assert torch.equal(mine.full_tensor(), theirs), name


def _check_view(shape: tuple[int, ...]) -> None:
    model, reference = _pair(shape, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    before = dict(model.named_parameters())
    with full_params(model):
        shown = dict(model.named_parameters(remove_duplicate=False))
        for name, theirs in reference.named_parameters(remove_duplicate=False):
            mine = shown[name]
            assert type(mine) is nn.Parameter
            assert torch.equal(mine, theirs), name
            assert mine.dtype == theirs.dtype, "full precision"
            assert mine.requires_grad == theirs.requires_grad
            assert mine.untyped_storage().nbytes() == theirs.numel() * theirs.element_size()
        assert model.head.weight is model.embedding.weight
        assert {type(m) for m in model.modules()} == {type(m) for m in reference.modules()}
        state = model.state_dict()
        assert state.keys() == reference.state_dict().keys()
        assert torch.equal(model(tokens()), reference(tokens())), "the plain forward, uncast"
        with torch.no_grad():
            for module in (model, reference):
                for i, parameter in enumerate(module.parameters()):
                    parameter.mul_(0.5).add_(i)
    assert all(p is before[n] for n, p in model.named_parameters())
    _assert_shards_equal(model, reference)
    assert torch.equal(state["head.weight"] * 1, reference.head.weight), "taken inside, still there"
    assert not any(unit.param_state.value == "full" for unit in units(model))


@pytest.mark.core
@long.parametrize("shape", [(1,), (2,), (4,), (2, 2)], always=[(2, 2)])
def test_everything_is_full_inside_and_what_was_written_is_kept(shape: tuple[int, ...]) -> None:
    run_ranks(_check_view, shape, world_size=torch.Size(shape).numel())


def _check_dropped() -> None:
    model, reference = _pair((dist.get_world_size(),))
    with full_params(model, writeback=False), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9)
    _assert_shards_equal(model, reference)


def test_without_writeback_changes_are_dropped() -> None:
    run_ranks(_check_dropped)
    run_ranks(_check_dropped, world_size=1)


def _check_tied_places() -> None:
    """What is put at one place of a tied parameter is at all of them; different values are refused."""
    new = torch.full((11, 6), 7.0)
    new[0] = torch.nan
    for change in (_assign_first, _assign_second, _load_second, _load_both):
        model, _ = _pair()
        with full_params(model):
            change(model, new)
        assert model.head.weight is model.embedding.weight
        torch.testing.assert_close(model.embedding.weight.full_tensor(), new, rtol=0, atol=0, equal_nan=True)
    for refused, what in (
        (_untie, "different parameters"),
        (_remove_second, "removed"),
        (_to_meta, "meta device"),
    ):
        for rank0_only in (False, True):
            model, _ = _pair()
            before = model.embedding.weight.full_tensor()
            with pytest.raises(ConfigError) as caught, full_params(model, rank0_only=rank0_only):  # noqa: PT012
                if dist.get_rank() == 0 or not rank0_only:
                    refused(model, new)
            assert (what if dist.get_rank() == 0 else "cannot be kept") in str(caught.value)
            assert torch.equal(model.head.weight.full_tensor(), before)


def _assign_first(model: Any, new: torch.Tensor) -> None:
    model.embedding.weight = nn.Parameter(new)


def _assign_second(model: Any, new: torch.Tensor) -> None:
    model.head.weight = nn.Parameter(new)


def _load_second(model: Any, new: torch.Tensor) -> None:
    model.load_state_dict({"head.weight": new}, strict=False, assign=True)


def _load_both(model: Any, new: torch.Tensor) -> None:
    values = {"embedding.weight": new, "head.weight": new.clone()}
    model.load_state_dict(values, strict=False, assign=True)


def _untie(model: Any, new: torch.Tensor) -> None:
    model.head.weight = nn.Parameter(new)
    model.embedding.weight = nn.Parameter(-new)


def _to_meta(model: Any, _: torch.Tensor) -> None:
    model.to("meta")


def _remove_second(model: Any, _: torch.Tensor) -> None:
    del model.head.weight


def test_a_change_at_any_place_of_a_tied_parameter_counts() -> None:
    run_ranks(_check_tied_places)


def _check_replaced_module() -> None:
    """A module that only the model holds is deleted where it is replaced."""
    for options in ({"rank0_only": True}, {"recurse": False}):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[1])
        fully_shard(model)
        with full_params(model, **options):
            model[0] = nn.Identity()
        with full_params(model):
            assert type(model[1].weight) is nn.Parameter


def test_a_module_can_be_replaced_inside() -> None:
    run_ranks(_check_replaced_module)


def _check_cast() -> None:
    model: Any = fully_shard(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="dtype changed"), full_params(model):
        model.bfloat16()
    with full_params(model, writeback=False):
        model.bfloat16()
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_cast_inside_is_refused_where_changes_are_kept() -> None:
    run_ranks(_check_cast)


def _check_attributes() -> None:
    model: Any = fully_shard(nn.Linear(3, 4))
    model.weight.tag, model.weight.gone = "before", 1
    with full_params(model):
        model.weight.tag, model.weight.new = "inside", [2]
        del model.weight.gone
        model.bias = nn.Parameter(torch.ones(4))
        model.bias.new = 3
    assert (model.weight.tag, model.weight.new, model.bias.new) == ("inside", [2], 3)
    assert not hasattr(model.weight, "gone")
    sharded = model.weight
    with full_params(model):
        model.weight.partner = model.bias
        sharded.beside = sharded.tag = "by another name of it"
    assert model.weight.partner is model.bias
    assert sharded.beside == model.weight.tag == "by another name of it"
    sharded.tag = "inside"
    with full_params(model, writeback=False):
        model.weight.tag = "dropped"
    assert model.weight.tag == "inside"
    model(torch.ones(2, 3))
    with full_params(model):
        assert (model.weight.tag, model.bias.new) == ("inside", 3)


def test_attributes_that_are_put_on_full_parameters_are_kept() -> None:
    run_ranks(_check_attributes)


def _check_own_part() -> None:
    """Ranks that write different things keep their own rows."""
    model = fully_shard(nn.Linear(3, 4))
    with full_params(model), torch.no_grad():
        model.weight.fill_(dist.get_rank())
        model.bias = nn.Parameter(torch.arange(4.0))
    full = model.weight.full_tensor()  # type: ignore[attr-defined]
    assert full[:, 0].tolist() == [0, 0, 1, 1]
    assert model.bias.full_tensor().tolist() == [0, 1, 2, 3]  # type: ignore[attr-defined]


def test_each_rank_keeps_its_own_part() -> None:
    run_ranks(_check_own_part)


def _check_first_rank(shape: tuple[int, ...], *, offload: bool) -> None:
    model, reference = _pair(shape)
    _backward(model, reference)
    with full_params(model, rank0_only=True, offload_to_cpu=offload, with_grads=True), torch.no_grad():
        first = dist.get_rank() == 0
        for name, mine in model.named_parameters():
            theirs = reference.get_parameter(name)
            assert isinstance(mine, DTensor) is not first
            if first:
                assert torch.equal(mine, theirs)
                assert (mine.grad is None) == (theirs.grad is None)
                mine.add_(1)
                if mine.grad is not None:
                    mine.grad.mul_(2)
        full = [copy.deepcopy(p.detach()) for p in model.parameters()] if first else []
        expected = [full]
        dist.broadcast_object_list(expected)
    for mine, value in zip(model.parameters(), expected[0], strict=True):
        assert torch.equal(mine.full_tensor(), value)
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), 2 * theirs.grad, msg=name)


@long.parametrize("shape", [(1,), (4,), (2, 2)], always=[(2, 2)])
def test_the_first_rank_alone_can_hold_and_write(shape: tuple[int, ...]) -> None:
    run_ranks(_check_first_rank, shape, offload=len(shape) == 1, world_size=torch.Size(shape).numel())


def _check_gradients() -> None:
    model, reference = _pair()
    _backward(model, reference)
    model.average.bias.grad = None
    with full_params(model, with_grads=True):
        for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            if name == "average.bias" or theirs.grad is None:
                assert mine.grad is None, name
            else:
                torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
        model.average.bias.grad = torch.ones(6)
        model.average.weight.grad = None
        model.embedding.weight.grad.fill_(7)
    assert model.average.bias.grad.full_tensor().tolist() == [1] * 6
    assert model.average.weight.grad is None
    assert (model.embedding.weight.grad.full_tensor() == 7).all()
    with full_params(model, with_grads=True, writeback=False):
        model.embedding.weight.grad.fill_(8)
    assert (model.embedding.weight.grad.full_tensor() == 7).all()
    if dist.get_rank() == 1:
        model.average.bias.grad = None
    with full_params(model, with_grads=True):  # zeros stand for the part that is missing
        assert model.average.bias.grad.tolist() == [1, 1, 1, 0, 0, 0]
    with pytest.warns(UserWarning, match="with_grads=True"), full_params(model):
        _backward(model)


def test_gradients_are_full_and_kept() -> None:
    run_ranks(_check_gradients)


def _check_low_precision_gradients(*, rank0_only: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
    fully_shard(model, mp_policy=MixedPrecision(torch.bfloat16, torch.float32, keep_low_precision_grads=True))
    model(torch.randn(4, 6)).square().mean().backward()
    if dist.get_rank() == 1:
        model[2].bias.grad = None
    wanted = {name: p.grad.full_tensor() for name, p in model.named_parameters() if name != "2.bias"}
    with full_params(model, with_grads=True, rank0_only=rank0_only):
        for name, parameter in model.named_parameters():
            if name in wanted and not isinstance(parameter, DTensor):
                assert parameter.grad.dtype is torch.bfloat16
                assert torch.equal(parameter.grad, wanted[name]), name
    for name, gradient in wanted.items():
        assert torch.equal(model.get_parameter(name).grad.full_tensor(), gradient), name
    bias = model[2].bias.grad
    assert (bias.dtype, bias.to_local().shape) == (torch.bfloat16, (3,)), "a rank without a gradient has zeros now"
    assert dist.get_rank() == 0 or not bias.to_local().any()


@pytest.mark.parametrize("rank0_only", [False, True])
def test_gradients_in_low_precision_are_full_and_kept(*, rank0_only: bool) -> None:
    run_ranks(_check_low_precision_gradients, rank0_only=rank0_only)


def _check_failed() -> None:
    model, _ = _pair()
    _backward(model)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    broken = mock.patch.object(full_params_file, "_set_gradient", side_effect=RuntimeError("no memory"))
    with broken, pytest.raises(RuntimeError, match="no memory"), full_params(model, with_grads=True):
        pass
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.grad is gradients[name]


def test_an_error_on_the_way_in_leaves_shards() -> None:
    run_ranks(_check_failed)


def _check_parts() -> None:
    model, reference = _pair()
    block, other = model.blocks[0], model.blocks[1]
    x = torch.ones(3, 6)
    with full_params(block):
        assert type(block.up.weight) is nn.Parameter
        assert isinstance(other.up.weight, DTensor)
        assert torch.equal(block(x), reference.blocks[0](x))
        with pytest.raises(ConfigError, match="partly unsharded"):
            model(tokens())
        with pytest.raises(ConfigError, match="held in full already"), full_params(model):
            pass
        assert type(block.up.weight) is nn.Parameter
        with full_params(other.down):
            assert type(other.down.weight) is nn.Parameter
    assert isinstance(block.up.weight, DTensor)
    with full_params(model, recurse=False):
        kept = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
        assert {n.split(".")[0] for n in kept} >= {"blocks"}
        assert any(not isinstance(p, DTensor) for p in model.parameters())
        with pytest.raises(ConfigError, match="partly unsharded"):
            model(tokens())
    with full_params(model.blocks, recurse=False):  # no unit: nothing happens
        assert isinstance(block.up.weight, DTensor)
    compiled: Any = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    torch.testing.assert_close(compiled(tokens()), reference(tokens()))
    with full_params(compiled):
        assert type(compiled.head.weight) is nn.Parameter
        with pytest.raises(Exception, match="while its parameters are held in full"):
            compiled(tokens())
        with torch.no_grad():
            compiled.head.weight.mul_(2)
            reference.head.weight.mul_(2)
    torch.testing.assert_close(compiled(tokens()), reference(tokens()))


@pytest.mark.core
def test_parts_of_a_model_and_compiled_ones() -> None:
    run_ranks(_check_parts)


class _Meddling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with full_params(self.inner):
            return self.inner(x)


def _check_refused() -> None:
    model = fully_shard(_Meddling())
    with pytest.raises(ConfigError, match="inside a step") as caught:
        model(torch.ones(2, 4))
    assert "in a forward" in str(caught.value)
    with pytest.raises(Exception, match="inside a step"):
        torch.compile(model, backend="fsdp", options={"lower": "eager"})(torch.ones(2, 4))
    plain = fully_shard(nn.Linear(4, 4))

    def hook(_: torch.Tensor) -> None:
        with full_params(plain):
            pass

    y = plain(torch.ones(2, 4, requires_grad=True))
    y.register_hook(hook)
    with pytest.raises(ConfigError, match="in a backward"):
        y.sum().backward()
    weight = plain.weight

    class _Ours(Exception):  # noqa: N818
        pass

    with pytest.raises(_Ours), full_params(plain), torch.no_grad():  # noqa: PT012
        plain.weight.fill_(3)
        raise _Ours
    assert plain.weight is weight
    assert (plain.weight.full_tensor() == 3).all()  # type: ignore[attr-defined]
    for change, what in ((_shape, "shape changed to (1, 4)"), (_freeze, "requires_grad changed"), (_drop, "removed")):
        with pytest.raises(ConfigError) as caught, full_params(plain, rank0_only=what == "removed"):  # noqa: PT012
            if what != "removed" or dist.get_rank() == 0:
                change(plain)
        assert ("removed" if what == "removed" and dist.get_rank() == 0 else "cannot be kept") in str(caught.value)
        assert what in str(caught.value) or dist.get_rank() == 1
        assert plain.weight is weight
    with full_params(plain):
        late = plain(torch.ones(2, 4)).sum()
        kept = plain.weight
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is plain.weight
    with pytest.raises(ConfigError, match="was sharded since you took it"):
        kept + 1
    with pytest.raises(ConfigError, match="full parameters that are gone"):
        late.backward()
    with torch.device("meta"):
        meta = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ConfigError, match="meta device"), full_params(meta):
        pass


def _shape(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.zeros(1, 4))


def _freeze(module: nn.Linear) -> None:
    module.weight.requires_grad_(False)  # noqa: FBT003  torch takes it by position only


def _drop(module: nn.Linear) -> None:
    del module.weight


@pytest.mark.core
def test_wrong_uses_are_refused_and_exceptions_leave_shards() -> None:
    run_ranks(_check_refused)


def _check_between() -> None:
    """A look at the parameters between forward and backward changes nothing."""
    model, reference = _pair()
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    losses = [m(tokens()).square().mean() for m in (compiled, reference)]
    with full_params(model):
        norm = sum(p.norm() for p in model.parameters())
    assert torch.isfinite(norm)
    for loss in losses:
        loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=name)


@pytest.mark.long
def test_a_look_between_forward_and_backward_is_harmless() -> None:
    run_ranks(_check_between)


def _devices(*, offload_to_cpu: bool) -> tuple[int, list[str]]:
    """How many parameters there are, and on which device each is gathered where ranks communicate on "meta"."""
    model, _ = _pair()
    devices: list[str] = []

    def gather(_local: torch.Tensor, spec: UnshardSpec, _receivers: object, device: torch.device) -> torch.Tensor:
        devices.append(device.type)
        return torch.zeros(spec.shape)

    with (
        mock.patch("fsdp_compile.state.full_params.gather_full", gather),
        mock.patch.object(exchange, "wire_device", return_value=torch.device("meta")),
        full_params(model, writeback=False, offload_to_cpu=offload_to_cpu),
    ):
        pass
    return len(list(model.parameters())), devices


def test_offloaded_parameters_are_gathered_on_the_host() -> None:
    """Message by message: `test_peak_memory.py` counts what is held meanwhile."""
    for offload_to_cpu, device in ((True, "cpu"), (False, "meta")):
        for count, devices in run_ranks(_devices, offload_to_cpu=offload_to_cpu):
            assert devices == [device] * count


def _written_while_gathered() -> list[list[str]]:
    """Units that are unsharded before and after one row is written in `full_params`; trains on as one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    alone = copy.deepcopy(model)
    for part in (*model, model):
        fully_shard(part)
    options: Any = {"lower": "eager", "bucket_mb": 0}
    compiled = torch.compile(model, backend="fsdp", options=options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    found = []
    for step in range(3):
        batch = torch.randn(4 * world, 8, generator=torch.Generator().manual_seed(step))
        compiled(batch.chunk(world)[rank]).square().mean().backward()
        alone(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model[0].unshard()
        if step == 1:
            found.append(_unsharded(model))
            with full_params(model), torch.no_grad():
                model[0].weight[:1].mul_(-3.0)
            with torch.no_grad():
                alone[0].weight[:1].mul_(-3.0)
            found.append(_unsharded(model))
            assert not found[-1], "rank 0 would gather again, and the others not"
    for part in (*model, model):
        part.reshard()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)
    return found


def _unsharded(model: nn.Module) -> list[str]:
    groups = [group for unit in units(model) for group in unit.param_groups]
    return [group.unit.title for group in groups if not group.unsharded.is_sharded]


def test_a_write_to_rows_of_one_rank_frees_what_all_have_gathered() -> None:
    assert run_ranks(_written_while_gathered) == [[["0"], []]] * 2
