"""Where values come from: the first rank, a checkpoint, an initialization of each module, or neither."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp_compile
from fsdp_compile import fully_shard, materialize
from fsdp_compile.errors import ConfigError, RankMismatchError
from fsdp_compile.sharding import fully_shard as front
from tests import long
from tests.models import llama
from tests.models.meta import assert_equal, on_meta
from tests.ranks import on_ranks
from tests.sharding.models import Block, Model, full, made, same, train_near_one_process
from tests.two_sides import mesh_of


class _Frequencies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.ones(4) / 3)

    def reset_parameters(self) -> None:
        self.get_buffer("frequencies").fill_(1 / 3)


class _Module(Model):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__(tied=tied, scale=True)
        self.register_buffer("running", torch.arange(3.0))
        self.rope = _Frequencies()

    def reset_parameters(self) -> None:
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
    says = r"0.bias is torch.float32 \(5,\), and on the first rank torch"
    if dist.get_rank() == 0:
        says = "another rank than this one differs from the first"
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


# Models on meta.


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embed(tokens))))


@on_ranks()
def test_it_stays_tied_as_with_fsdp2() -> None:
    torch.manual_seed(0)
    values = _Tied().state_dict()
    tokens = torch.arange(6).view(2, 3)
    gradients = []
    for shard in (fsdp2, fully_shard):
        with torch.device("meta"):
            model: Any = _Tied()
        shard(model)
        loaded = {
            name: nn.Parameter(distribute_tensor(values[name], held.device_mesh, held.placements))
            for name, held in model.state_dict().items()
        }
        model.load_state_dict(loaded, assign=True)
        model(tokens).square().mean().backward()
        gradients.append({name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None})
    assert model.head.weight is model.embed.weight
    assert set(gradients[1]) == {"embed.weight", "inner.weight", "inner.bias"}
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradient, gradients[0][name])


class _Masked(nn.Module):
    """A weight, and two buffers that no checkpoint holds, one of which is computed from the weight."""

    table: torch.Tensor
    norm: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("norm", torch.zeros(()), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.weight.data[0].zero_()
        self.table.copy_(torch.arange(4.0))
        self.norm.copy_(self.weight.detach().norm())


class _Block(nn.Module):
    """Nothing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), _Masked()


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | _Masked):
        module.reset_parameters()


def _by_replacing(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | _Masked):
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()
        module.weight = nn.Parameter(torch.zeros_like(module.weight))


def _make() -> nn.Module:
    return nn.Sequential(_Block(), _Masked())


@long.parametrize("way", ["loaded", "assigned", "replaced", "ignored"], always=["loaded", "ignored"])
@on_ranks()
def test_loaded_values_stay(way: str) -> None:
    torch.manual_seed(1)
    state = _make().state_dict()
    model = on_meta(_make)
    if way == "assigned":
        model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
        fully_shard(model, param_init_fn=_init)
    else:
        if way == "ignored":
            model[1].weight = nn.Parameter(state["1.weight"].clone())
        fully_shard(model, ignored_params=[model[1].weight] if way == "ignored" else [])
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, dict(state) if dist.get_rank() == 0 else {}, options=options)
        materialize(model, param_init_fn=_by_replacing if way in ("replaced", "ignored") else _init)
    full = dict(fsdp_compile.full_tensors(model))
    assert all(torch.equal(full[name], value) for name, value in state.items())
    assert torch.equal(model[1].table, torch.arange(4.0))
    assert model[1].norm > 0, "of what the initialization wrote to the weight"


@on_ranks()
def test_bottom_up_calls_initialize_each_module_once() -> None:
    called: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        called.append(module)
        _by_replacing(module)

    model = on_meta(lambda: nn.Sequential(_Block(), _Block(), nn.Linear(4, 4)))
    for block in model[:2]:
        fully_shard(block, param_init_fn=init)
    fully_shard(model, param_init_fn=init)
    with_own = [module for module in model.modules() if module._parameters]
    assert sorted(map(id, called)) == sorted(map(id, with_own)), "each once"
    assert all(not value.is_meta and not value.isnan().any() for _, value in fsdp_compile.full_tensors(model))


# A skip in a rank would be an error here.
with_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


@pytest.mark.core
@with_transformers
@on_ranks()
def test_init_weights_gives_the_values_of_one_process() -> None:
    for tied in (False, True):
        make = functools.partial(llama.model, vocab_size=61, tie_word_embeddings=tied)  # uneven rows
        model = on_meta(make)
        fully_shard(model)
        torch.manual_seed(5)
        materialize(model, param_init_fn=model._init_weights)

        reference = make()
        for module in reference.modules():
            module._is_hf_initialized = False
        torch.manual_seed(5)
        reference.init_weights()
        assert_equal(model, reference)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.core
@with_transformers
@on_ranks()
def test_a_module_that_initializes_its_parts_again_does_so_after_to_empty() -> None:
    model = on_meta(_gpt2)
    fully_shard(model)
    torch.manual_seed(5)
    model.to_empty(device="cpu")
    model.apply(model._init_weights)  # also for modules that have no parameters of their own
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and "ln_" not in name:
            # Attention initializes the weight of its projection again, which is sharded by then.
            wanted = 0.02 / 2 if name.endswith("c_proj.weight") else 0.02
            assert abs(parameter.full_tensor().std().item() / wanted - 1) < 0.1, name


def _gpt2() -> torch.nn.Module:
    """Its attention scales a weight of its projection, after that was initialized."""
    import transformers

    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=61, bos_token_id=None, eos_token_id=None
    )
    return transformers.GPT2LMHeadModel(config)
