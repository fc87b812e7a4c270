"""Models on meta get their values: from a checkpoint, or from initializations that run once on each module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import distribute_tensor

import fsdp_compile
from fsdp_compile import fully_shard, materialize
from tests import long
from tests.models.meta import assert_equal, on_meta
from tests.ranks import on_ranks


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


transformers = pytest.importorskip("transformers")


def _llama(*, tied: bool) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=61,  # uneven
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.core
@on_ranks()
def test_init_weights_gives_the_values_of_one_process() -> None:
    for tied in (False, True):
        model = on_meta(lambda tied=tied: _llama(tied=tied))  # type: ignore[misc]
        fully_shard(model)
        torch.manual_seed(5)
        materialize(model, param_init_fn=model._init_weights)

        reference = _llama(tied=tied)
        for module in reference.modules():
            module._is_hf_initialized = False  # type: ignore[assignment]
        torch.manual_seed(5)
        reference.init_weights()  # type: ignore[operator]
        assert_equal(model, reference)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.core
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
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=61, bos_token_id=None, eos_token_id=None
    )
    return transformers.GPT2LMHeadModel(config)
