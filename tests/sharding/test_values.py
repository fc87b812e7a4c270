"""Where values come from: the first rank, an initialization, or neither."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile.errors import ConfigError, RankMismatchError
from fsdp_compile.sharding import fully_shard as front
from fsdp_compile.sharding.fully_shard import fully_shard
from fsdp_compile.sharding.materialize import materialize
from tests import long
from tests.ranks import on_ranks
from tests.sharding.models import Block, Model, full, made, same, train_near_one_process
from tests.two_sides import mesh_of


class _Frequencies(nn.Module):
    """Has a buffer, and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.ones(4) / 3)

    def reset_parameters(self) -> None:
        self.get_buffer("frequencies").fill_(1 / 3)


class _Module(Model):
    """With buffers, a 0-d parameter and an initialization of its own."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__(tied=tied, scale=True)
        self.register_buffer("running", torch.arange(3.0))
        self.rope = _Frequencies()

    def reset_parameters(self) -> None:
        """As constructed."""
        with torch.no_grad():
            self.scale.fill_(1.5)  # type: ignore[union-attr]
            self.count.copy_(torch.tensor([3, 4]))  # type: ignore[union-attr]
        self.get_buffer("running").copy_(torch.arange(3.0))


def _values(model: nn.Module) -> list[torch.Tensor]:
    return [*full(model), *(buffer.clone() for buffer in model.buffers())]


@long.parametrize("on_meta", [False, True], always=[True])
@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
@on_ranks(world_size=lambda mesh, **_: 2 * len(mesh))
def test_the_first_ranks_values_are_sent(*, mesh: tuple[int, ...], on_meta: bool) -> None:
    rank = dist.get_rank()
    with torch.device("meta" if on_meta and rank else "cpu"):
        model = made(_Module, seed=rank)
    if not on_meta:
        model.running += rank
    fully_shard(model, sync_module_states=True, mesh=mesh_of(mesh))
    assert same(_values(model), _values(made(_Module)))
    train_near_one_process(model, made(_Module), 1)


@on_ranks()
def test_ignored_parameters_are_not_sent() -> None:
    model = made(_Module, seed=dist.get_rank())
    kept = model.head.weight.clone()
    fully_shard(model, sync_module_states=True, ignored_params=[model.head.weight])
    assert torch.equal(model.head.weight, kept)


@on_ranks()
def test_ranks_with_different_models_all_hear_of_it() -> None:
    what = (
        r"0.bias is torch.float32 \(5,\), and on the first rank torch",
        "another rank than this one differs from the",
    )
    says = f"ranks have different models: {what[dist.get_rank() == 0]}"
    with pytest.raises(RankMismatchError, match=f"ranks have different models: {says}"):
        fully_shard(nn.Sequential(nn.Linear(4, 4 + dist.get_rank())), sync_module_states=True)


def _reset(module: nn.Module) -> None:
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()


def _to_empty(module: nn.Module) -> None:
    if any(t.is_meta for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
        module.to_empty(device="cpu", recurse=False)
        _reset(module)


@pytest.mark.parametrize(
    ("init", "seeds", "tied", "offload"),
    [
        pytest.param(_reset, 0, False, False, marks=pytest.mark.long),
        (_to_empty, 0, False, False),
        (_reset, 1, True, True),  # each rank has a seed of its own, and the first one's counts
    ],
)
@on_ranks()
def test_param_init_fn_gives_what_one_process_has(
    *, init: Callable[[nn.Module], None], seeds: int, tied: bool, offload: bool
) -> None:
    with torch.device("meta"):
        model = _Module(tied=tied)
    torch.manual_seed(7 + seeds * dist.get_rank())
    policy: Any = CPUOffloadPolicy(pin_memory=False) if offload else None
    fully_shard(model, param_init_fn=init, offload_policy=policy)
    alone = _Module(tied=tied)
    torch.manual_seed(7)
    alone.apply(_reset)
    assert not tied or model.head.weight is model.embed.weight
    assert same(_values(model), _values(alone))
    train_near_one_process(model, alone, 1)


@on_ranks()
def test_without_it_meta_stays_meta_until_materialize() -> None:
    with torch.device("meta"):
        model = fully_shard(_Module())
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(RuntimeError, match="meta device"):
        model(torch.zeros(1, 1, dtype=torch.int64))
    optimized = fully_shard(made(_Module, seed=3))
    torch.manual_seed(7)
    materialize(model)
    materialize(optimized)  # nothing to do
    alone = _Module()
    torch.manual_seed(7)
    alone.apply(_reset)
    assert same(_values(model), _values(alone))
    assert same(_values(optimized), _values(made(_Module, seed=3)))


@on_ranks()
def test_one_module_is_full_at_a_time() -> None:
    """The most elements that an initialization found in memory at once, beyond this rank's shards."""
    with torch.device("meta"):
        model = Model()
    most = 0

    def init(module: nn.Module) -> None:
        nonlocal most
        held = {p for p in model.parameters() if not isinstance(p, DTensor) and not p.is_meta}
        most = max(most, sum(p.numel() for p in held))
        _reset(module)

    fully_shard(model, param_init_fn=init)
    assert most == 6 * 13 + 13


@on_ranks()
def test_what_has_a_value_keeps_it() -> None:
    model = made()
    model.blocks[0].norm.weight = nn.Parameter(torch.empty(6, device="meta"))
    kept = model.blocks[0].norm.bias.detach().clone().fill_(3)
    model.blocks[0].norm.bias.data.fill_(3)
    fully_shard(model, param_init_fn=_to_empty)
    found = model.blocks[0].norm
    assert torch.equal(found.bias.full_tensor(), kept)
    assert bool((found.weight.full_tensor() == 1).all())


def test_initializations_that_leave_something_are_refused(fake_world: Callable[..., Any]) -> None:
    def shapes(module: nn.Module) -> None:
        module._parameters = {name: nn.Parameter(torch.zeros(3)) for name in module._parameters}

    wrong: list[tuple[Any, str]] = [
        (lambda _: None, r"left it on meta[^$]*0\.weight"),
        (lambda m: getattr(m, "bias", torch.zeros(1)).data.fill_(1), r"without a value[^$]*0\.weight"),
        (shapes, r"of shape \(3,\)[^$]*0\.weight"),
    ]
    with fake_world(2):
        for init, message in wrong:
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(4, 4))
            with pytest.raises(ConfigError, match=message):
                fully_shard(model, param_init_fn=init)
        with pytest.raises(ConfigError, match="nothing in this model is sharded"):
            materialize(nn.Linear(4, 4))
        with torch.device("meta"):
            bare = nn.Module()
            bare.weight = nn.Parameter(torch.empty(4))
        with pytest.raises(ConfigError, match="no reset_parameters"):
            materialize(fully_shard(bare))


def _in_memory() -> list[nn.Parameter]:
    gc.collect()
    return [p for p in gc.get_objects() if type(p) is nn.Parameter and p.dim() and not p.is_meta]


@on_ranks()
def test_one_unit_is_whole_at_a_time() -> None:
    """Where the first rank alone has values: elements of unsharded parameters in memory after each call of torch's."""
    is_first = dist.get_rank() == 0
    with torch.device("cpu" if is_first else "meta"):
        model = Model()
    earlier = {id(p) for p in _in_memory()}
    found: list[int] = []
    run = front.torch_fully_shard

    def count(module: Any, **given: Any) -> Any:
        result = run(module, **given)
        found.append(sum(p.numel() for p in _in_memory() if id(p) not in earlier))
        return result

    with mock.patch.object(front, "torch_fully_shard", count):
        fully_shard(model, sync_module_states=True)
    assert is_first or 0 < max(found) <= sum(p.numel() for p in Block().parameters())
