"""`fully_shard` makes what torch's `fully_shard` makes, called by hand; shards on the host, too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import MixedPrecision as FSDP1MixedPrecision
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp_compile
from fsdp_compile import fully_shard
from fsdp_compile._torch import fully_shard as states
from fsdp_compile._torch import fully_shard_calls as private
from fsdp_compile.config.policy import as_offload
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from tests.models.kinds import Stack
from tests.ranks import on_ranks
from tests.sharding.models import Model, full, made, same, same_call, train_alike, train_near_one_process
from tests.two_sides import WithOneProcess, compare_gradients

Dims: Any = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)  # newer than torch 2.11


def _names(model: nn.Module) -> list[str]:
    """The modules that are units."""
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def _calls(model: nn.Module) -> list[list[str]]:
    """The units: names of the modules of each."""
    names = {module: name for name, module in model.named_modules()}
    return [[names[module] for module in call] for call in same_call(model.modules())]


def _by_hand(model: Any, **given: Any) -> Any:
    for part in (model.embed, *model.blocks, model.head, model):
        fsdp2(part, **given)
    return model


LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
OUTPUT = dataclasses.replace(LOW, output_dtype=torch.float32)
INSIDE = dataclasses.replace(LOW, cast_forward_inputs=False)
POLICIES: list[tuple[Any, MixedPrecisionPolicy, MixedPrecisionPolicy]] = [
    (None, MixedPrecisionPolicy(), MixedPrecisionPolicy()),
    (OUTPUT, OUTPUT, INSIDE),
    (FSDP1MixedPrecision(torch.bfloat16, torch.float32), LOW, INSIDE),
]
"""What our call is given, and torch's: for the root, and for units in it."""


@on_ranks()
def test_automatic_units_train_as_torchs_by_hand() -> None:
    for policy, of_root, of_others in POLICIES:
        ours, theirs = made(), made()
        assert fully_shard(ours, mp_policy=policy) is ours
        for part in (theirs.embed, *theirs.blocks, theirs.head):
            fsdp2(part, mp_policy=of_others)
        fsdp2(theirs, mp_policy=of_root)
        assert _names(ours) == _names(theirs)
        train_alike(ours, theirs)


@on_ranks()
def test_calls_bottom_up_are_one_unit_each() -> None:
    ours, theirs = made(), made()
    for block in ours.blocks:
        fully_shard(block)
        assert sum(isinstance(part, FSDPModule) for part in block.modules()) == 3  # split, as it may be all there is
    fully_shard(ours)
    assert _names(ours) == ["", "blocks.0", "blocks.1", "blocks.2"]
    for block in theirs.blocks:
        fsdp2(block)
    fsdp2(theirs)
    with pytest.raises(AssertionError, match="can only be applied to a module once"):
        fully_shard(ours)
    with pytest.raises(AssertionError, match="can only be applied to a module once"):
        fully_shard(ours.blocks[0])
    train_alike(ours, theirs)


@on_ranks()
def test_modules_that_torchs_was_called_on_are_left_alone() -> None:
    ours, theirs = made(), _by_hand(made())
    for part in (ours.embed, *ours.blocks, ours.head):
        fsdp2(part)
    fully_shard(ours)
    assert _names(ours) == _names(theirs)
    train_alike(ours, theirs)


def test_wrong_arguments_are_refused(fake_world: Callable[..., Any]) -> None:
    first = nn.Linear(4, 4)
    with fake_world(4):
        wrong: list[tuple[Any, dict[str, Any], str]] = [
            ([], {}, "the list is empty"),
            ([first, 3], {}, "int is not a torch.nn.Module"),
            ([first], {"auto_wrap_policy": lambda *_, **__: True}, "a wrap policy would choose others"),
            (first, {"param_init_fn": 3}, "cannot be called"),
            (first, {"sync_module_states": 1}, "sync_module_states is 1"),
            (first, {"device_id": "cuda:0", "mesh": init_device_mesh("cpu", (4,))}, "not one of the mesh"),
            (first, {"ignored_params": [first]}, "is the module of the call"),
        ]
        for module, given, message in wrong:
            with pytest.raises(ConfigError, match=message):
                fully_shard(module, **given)
        assert type(first) is nn.Linear
        assert not isinstance(first.weight, DTensor)


@on_ranks()
def test_units_that_share_a_parameter_become_one() -> None:
    ours, theirs = made(lambda: Model(tied=True)), made(lambda: Model(tied=True))
    fully_shard(ours)
    assert ["embed", "head"] in _calls(ours)
    for block in theirs.blocks:
        fsdp2(block)
    fsdp2([theirs.embed, theirs.head])
    fsdp2(theirs)
    train_alike(ours, theirs)
    assert ours.embed.weight is ours.head.weight


def test_a_parameter_that_the_rest_of_the_model_has_too_is_of_the_rest(fake_world: Callable[..., Any]) -> None:
    with fake_world(2):
        model = made()
        model.also = model.blocks[1].mlp[0].weight
        fully_shard(model)
        assert _names(model) == ["", "embed", "blocks.0", "blocks.2", "head"]
        several = made()
        several.blocks[1].mlp = several.blocks[0].mlp  # a module with two places
        assert _calls(fully_shard(several))[2:] == [["blocks.0", "blocks.1"], ["blocks.2"], ["head"]]


def test_tied_units_need_one_policy(fake_world: Callable[..., Any]) -> None:
    policy = CustomPolicy(
        lambda m: {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)} if isinstance(m, nn.Embedding) else False
    )
    with fake_world(2), pytest.raises(ConfigError, match=r"different ways\n  where: embed.weight"):
        fully_shard(made(lambda: Model(tied=True)), auto_wrap_policy=policy)


class _TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(6, 6).bfloat16(), nn.Linear(6, 6)
        self.frozen = nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = tokens[..., :1].float().expand(-1, 6) * self.frozen.float()
        return self.high(x) + self.low(x.bfloat16()).float()


@on_ranks()
def test_a_second_dtype_is_a_second_group() -> None:
    model = fully_shard(made(_TwoDtypes))
    train_near_one_process(model, made(_TwoDtypes), atol=0.02)
    assert len(fsdp2.state(model)._fsdp_param_groups) == 2  # type: ignore[attr-defined]


def test_a_second_dtype_needs_a_torch_with_lists_of_groups(
    fake_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "has_group_lists", lambda: False)
    with fake_world(2), pytest.raises(ConfigError, match=r"needs one dtype[^$]*where: high.weight"):
        fully_shard(_TwoDtypes())


def test_parameters_that_fsdp2_cannot_split_are_refused_by_name(fake_world: Callable[..., Any]) -> None:
    with fake_world(4):
        model: Any = Model()
        model.blocks[1].extra = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
        with pytest.raises(UnsupportedModelError, match=r"complex[^$]*blocks\.1\.extra"):
            fully_shard(model)
        assert _names(model) == []
        fully_shard(model, ignored_params=[model.blocks[1].extra])
        assert not isinstance(model.blocks[1].extra, DTensor)
        model = Model()
        model.blocks[1].extra = nn.Parameter(torch.zeros(4, 8).t())
        with pytest.raises(NotImplementedError, match="does not support non-contiguous parameters"):
            fully_shard(model)
        with pytest.raises(NotImplementedError, match="uneven sharding on dim 1"):
            fully_shard(Model(), shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
        with pytest.raises(AssertionError, match="Shard dim 2 is invalid"):
            fully_shard(nn.Linear(8, 8), shard_placement_fn=lambda _: Shard(2))
        model = fully_shard(nn.Linear(8, 8), shard_placement_fn=lambda p: Shard(p.dim() - 1))
        assert [p.placements for p in model.parameters()] == [(Shard(1),), (Shard(0),)]


@on_ranks(world_size=4)
def test_hybrid_sharding_trains_as_torchs() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    ours = fully_shard(made(), mesh=mesh, reshard_after_forward=True)
    train_alike(ours, _by_hand(made(), mesh=mesh, reshard_after_forward=True))


@pytest.mark.parametrize("reshard", [True, False, 1, 2, "auto", None])
def test_reshard_after_forward_is_torchs(fake_world: Callable[..., Any], reshard: Any) -> None:
    with fake_world(4):
        ours: Any = fully_shard(Model(), reshard_after_forward=reshard)
        theirs = _by_hand(Model(), reshard_after_forward=True if reshard == "auto" else reshard)
        for a, b in ((ours, theirs), (ours.blocks[0], theirs.blocks[0])):
            (own,), (other,) = (fsdp2.state(m)._fsdp_param_groups for m in (a, b))  # type: ignore[attr-defined]
            assert own.post_forward_mesh_info == other.post_forward_mesh_info
            assert private.kept_with(a, "settings").auto_reshard is (reshard == "auto")


@on_ranks()
def test_offload_is_torchs() -> None:
    policy = CPUOffloadPolicy(pin_memory=False)
    ours = fully_shard(made(), offload_policy=policy)
    theirs = _by_hand(made(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    train_alike(ours, theirs)


@on_ranks()
def test_device_id_names_where_torch_moves_units() -> None:
    assert same(full(fully_shard(made(), device_id="cpu")), full(_by_hand(made())))


def _placements(shard: Callable[..., Any], mesh: DeviceMesh) -> list[Any]:
    found: list[Any] = []
    for placement in (Shard(0), Shard(1), Replicate()):
        for mesh_of_params, given in (
            (mesh["tp"], {"mesh": mesh["dp"]}),
            *([(mesh, {"mesh": mesh, "dp_mesh_dims": Dims(shard="dp")})] if Dims is not None else []),
        ):
            model: Any = nn.Sequential(nn.Linear(8, 8, bias=False))
            over = (placement,) if mesh_of_params.ndim == 1 else (Replicate(), placement)
            model[0].weight = nn.Parameter(distribute_tensor(model[0].weight, mesh_of_params, over))
            shard(model[0], **given)
            shard(model, **given)
            found.append((model[0].weight.placements, model[0].weight.to_local().shape))
    return found


def test_dtensors_over_other_dimensions_of_the_mesh_are_torchs_matter(fake_world: Callable[..., Any]) -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ours = _placements(fully_shard, mesh)
        assert ours == _placements(fsdp2, mesh)
        assert len(set(ours)) >= 3


# Shards on the host.


def test_policies_of_both_fsdps_are_understood() -> None:
    for policy in (CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False), OffloadPolicy()):
        assert as_offload(policy) is policy
    assert as_offload(CPUOffload(offload_params=True)) == CPUOffloadPolicy()
    assert as_offload(CPUOffload(offload_params=False)) == OffloadPolicy()
    assert as_offload(None) == OffloadPolicy()


@on_ranks()
def test_gradients_add_up_and_norm_state_and_checkpoints_stay_on_the_host() -> None:
    shard = functools.partial(fully_shard, offload_policy=CPUOffloadPolicy(pin_memory=False))
    pair = WithOneProcess(lambda: nn.Linear(8, 4, bias=False), shard=shard, shape=8, twice=False)
    for _ in range(2):  # FSDP1 keeps the last gradient only
        pair.backward()
    compare_gradients(pair.model, pair.reference, within=(1.3e-6, 1e-5))
    model = pair.model
    norm = fsdp_compile.clip_grad_norm_(model, 1e9)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(pair.reference.parameters(), 1e9))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    state: list[Any] = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    assert {v.device for v in [norm, *state, *model.state_dict().values()]} == {torch.device("cpu")}


@pytest.mark.optional
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_a_gpu_trains_from_pinned_shards(lower: str) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model, reference = Stack(), Stack()
        reference.load_state_dict(model.state_dict())
        reference.cuda()
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)), offload_policy=CPUOffloadPolicy())
        compiled = torch.compile(model, backend="fsdp", options={"lower": lower})
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
        for step in range(6):
            batch = torch.randn(64, 32, generator=torch.Generator().manual_seed(step)).cuda()
            loss, expected = compiled(batch).square().mean(), reference(batch).square().mean()
            torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
            loss.backward()
            expected.backward()
            if step % 2:  # two backwards are added on the host
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert mine.device.type == "cpu"
            torch.testing.assert_close(mine.full_tensor(), theirs.cpu(), rtol=1e-3, atol=1e-4)  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()
