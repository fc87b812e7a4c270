"""What each strategy means for a mesh, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, FSDPOptions, fully_shard, units
from fsdp_compile._torch.distributed import resolve_group
from fsdp_compile.comm import mesh as mesh_module
from fsdp_compile.layout.hosts import GroupRanks
from fsdp_compile.layout.spec import Reshard, UnshardSpec, parse
from tests.fake_world import fake_world
from tests.models.outlines import Block, Small, Transformer

KEPT, FREED = Reshard.AFTER_BACKWARD, Reshard.AFTER_FORWARD
S = ShardingStrategy


def _specs(model: nn.Module) -> list[UnshardSpec]:
    (unit,) = units(model)
    return [param.spec for group in unit.groups for param in group.params]


@pytest.mark.core
@pytest.mark.parametrize(
    ("strategy", "size", "replicas", "reshard"),
    [
        (None, 8, 1, KEPT),  # as FSDP2's root
        (S.FULL_SHARD, 8, 1, FREED),
        (S.SHARD_GRAD_OP, 8, 1, KEPT),
        (S.NO_SHARD, 1, 8, KEPT),
        (S.HYBRID_SHARD, 4, 2, FREED),
        (S._HYBRID_SHARD_ZERO2, 4, 2, KEPT),
    ],
)
def test_what_a_strategy_means(
    strategy: S | None, size: int, replicas: int, reshard: Reshard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with fake_world(8):
        for spec in _specs(fully_shard(Small(), sharding_strategy=strategy)):
            assert (spec.size, spec.replicas, spec.reshard) == (size, replicas, reshard)


@pytest.mark.core
@pytest.mark.parametrize(
    ("number", "reshard", "kept_over"), [(8, FREED, 1), (1, KEPT, 1), (2, FREED, 2), (4, FREED, 4)]
)
def test_what_a_number_means_for_what_is_kept(number: int, reshard: Reshard, kept_over: int) -> None:
    with fake_world(8, rank=5):
        for spec in _specs(fully_shard(Small(), reshard_after_forward=number)):
            assert parse(spec.text) == spec
            assert (spec.reshard, spec.post_forward_size, spec.size) == (reshard, kept_over, 8)
            if kept_over > 1:
                kept = resolve_group(spec.post_forward_group)
                assert kept is not None
                begin = 5 // kept_over * kept_over
                assert dist.get_process_group_ranks(kept) == list(range(begin, begin + kept_over))


def test_calls_without_a_mesh_share_the_groups_of_a_hybrid_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    model = nn.Sequential(Small(), Small())
    with fake_world(6, rank=3):
        for child in model:
            fully_shard(child, sharding_strategy=S.HYBRID_SHARD)
        meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
        mesh = meshes[0]
        assert set(meshes) == {mesh}
        assert len({tuple(map(id, each.get_all_groups())) for each in meshes}) == 1
        assert mesh.mesh.tolist() == [[0, 1], [2, 3], [4, 5]]
        assert mesh.mesh_dim_names == ("dp_replicate", "fsdp")
        assert mesh.get_local_rank("fsdp") == 1


@pytest.mark.parametrize(
    ("dims", "stride", "replicate_stride"),
    [(("d",), 1, 1), (("b",), 4, 1), (("b", "c"), 2, 4), (("a", "c"), 2, 8), (("c", "d"), 1, 2)],
)
def test_strides_of_groups_are_those_of_their_ranks(dims: tuple[str, ...], stride: int, replicate_stride: int) -> None:
    with fake_world(16, rank=5):
        mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("a", "b", "c", "d"))[dims]
        for spec in _specs(fully_shard(Small(), mesh=mesh)):
            assert (spec.stride, spec.replicate_stride) == (stride, replicate_stride)
            assert parse(spec.text) == spec
            group = resolve_group(spec.group)
            assert group is not None
            assert GroupRanks.of(dist.get_process_group_ranks(group)) == spec.shard_ranks


def test_names_of_dimensions_are_those_of_the_mesh_that_was_given() -> None:
    with fake_world(4):
        for names, shape in ((("data",), (4,)), (("a", "b"), (2, 2)), (None, (4,)), (("dp_replicate", "fsdp"), (2, 2))):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            weight: Any = fully_shard(nn.Linear(4, 4), mesh=mesh).weight
            assert weight.device_mesh == mesh
            assert weight.device_mesh.mesh_dim_names == names
        default: Any = fully_shard(nn.Linear(4, 4)).weight
        assert default.device_mesh.mesh_dim_names is None  # as FSDP2's


def test_without_a_launcher_a_machine_has_as_many_ranks_as_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(device_count=lambda: 3))
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(mesh_module, "default_mesh", lambda _: SimpleNamespace(size=lambda: 6))
    monkeypatch.setattr(mesh_module, "mesh_of_shape", lambda _, shape: made.append(shape))
    mesh_module.hybrid_mesh("cuda")
    assert made == [(2, 3)]


def test_a_strategy_is_an_option_of_the_backend() -> None:
    with fake_world(4):
        model = Small()
        options: Any = {"lower": "eager", "sharding_strategy": S.NO_SHARD}
        torch.compile(model, backend="fsdp", options=options)(torch.ones(2, 6))
        assert {spec.replicas for spec in _specs(model)} == {4}
    assert FSDPOptions(sharding_strategy=S.NO_SHARD).sharding == {"sharding_strategy": S.NO_SHARD}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "twice": ({"sharding_strategy": S.FULL_SHARD, "reshard_after_forward": True}, "already decides"),
    "no-strategy": ({"sharding_strategy": "FULL_SHARD"}, "sharding_strategy is 'FULL_SHARD'"),
    "no-machine": ({"sharding_strategy": S.HYBRID_SHARD}, "how many ranks share a machine"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_contradictions_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    arguments, what = WRONG[kind]
    with fake_world(4), pytest.raises(ConfigError, match=what):
        fully_shard(Small(), **arguments)


def test_a_strategy_on_a_mesh_of_another_dimension_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(4):
        line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        for strategy, mesh in ((S.HYBRID_SHARD, line), (S.NO_SHARD, square), (S.FULL_SHARD, square)):
            with pytest.raises(ConfigError, match=f"{strategy.name} is for a mesh of"):
                fully_shard(Small(), sharding_strategy=strategy, mesh=mesh)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
        with pytest.raises(ConfigError, match="4 ranks do not divide into machines of 3"):
            fully_shard(Small(), sharding_strategy=S.HYBRID_SHARD)


def _by_title(model: nn.Module) -> dict[str, UnshardSpec]:
    return {unit.title: unit.groups[0].params[0].spec for unit in units(model)}


def test_units_may_differ_in_strategy() -> None:
    """Bottom-up calls, and a wrap policy that returns what is different."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with fake_world(4):
        called = Transformer()
        fully_shard(called.blocks[0], sharding_strategy=S.NO_SHARD)
        fully_shard(called.blocks[1], sharding_strategy=S.SHARD_GRAD_OP, mp_policy=half)
        fully_shard(called)
        chosen = Transformer()
        overrides: dict[int, dict[str, Any]] = {
            id(chosen.blocks[0]): {"sharding_strategy": S.NO_SHARD},
            id(chosen.blocks[1]): {"reshard_after_forward": False, "mp_policy": half},
        }
        policy = CustomPolicy(lambda m: overrides.get(id(m), isinstance(m, Block)))
        fully_shard(chosen, auto_wrap_policy=policy)
        for model in (called, chosen):
            by_title = _by_title(model)
            assert by_title["blocks.0"].replicas == 4
            assert by_title["blocks.1"].reshard is KEPT
            assert by_title["blocks.1"].param_dtype is torch.bfloat16
            assert by_title["(root)"].size == 4
            assert by_title["(root)"].param_dtype is torch.float32
        assert "blocks.2" in _by_title(chosen)


@pytest.mark.parametrize(
    ("override", "what", "instead"),
    [
        ({"shardin_strategy": S.NO_SHARD}, "'shardin_strategy'", "'sharding_strategy'"),
        ({"backward_prefetch": None}, "'backward_prefetch'", "one of sharding_strategy"),
        ({"mp_policy": "bf16"}, "mp_policy is a str", "MixedPrecisionPolicy"),
        ({"sharding_strategy": S.NO_SHARD, "reshard_after_forward": False}, "already decides", "one of the two"),
    ],
)
def test_wrong_overrides_are_refused(override: dict[str, Any], what: str, instead: str) -> None:
    policy = CustomPolicy(lambda m: override if isinstance(m, Block) else False)
    with fake_world(4), pytest.raises(ConfigError) as caught:
        fully_shard(Transformer(), auto_wrap_policy=policy)
    assert what in caught.value.what
    assert instead in (caught.value.instead or "")
