"""transformers' models in loops of users: T5 with each block a unit, and generation during training."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from fsdp_compile import full_params, fully_shard
from tests.ranks import on_ranks
from tests.two_sides import close, compile_eagerly

transformers = pytest.importorskip("transformers")


def _train(model: Any, called: Any, reference: Any, *, steps: int) -> None:
    """Both on the same rows, of which each rank has a part."""
    world, rank = dist.get_world_size(), dist.get_rank()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in (model, reference)]
    for number in range(steps):
        rows = torch.randint(1, 32, (4, 8), generator=torch.Generator().manual_seed(number))
        own = rows.chunk(world)[rank]
        loss = called(input_ids=own, labels=own).loss
        loss.backward()
        expected = reference(input_ids=rows, labels=rows).loss
        expected.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / world, expected.detach(), rtol=2e-5, atol=2e-5)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        close(norm.full_tensor(), torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0), "norm")  # type: ignore[attr-defined]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.long
@pytest.mark.parametrize("wrapped_by", ["policy", "calls"])
@on_ranks()
def test_t5_equals_one_process(wrapped_by: str) -> None:
    """As pytorch/examples trains it with FSDP1: a policy over `T5Block`; or FSDP2's calls, bottom-up."""
    from transformers.models.t5.modeling_t5 import T5Block

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    reference = copy.deepcopy(model)
    if wrapped_by == "policy":
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
        fully_shard(model, auto_wrap_policy=policy)
    else:
        for module in model.modules():
            if isinstance(module, T5Block):
                fully_shard(module)
        fully_shard(model)
    _train(model, compile_eagerly(model), reference, steps=2)


@pytest.mark.long
@on_ranks()
def test_generation_during_training_equals_one_process() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    reference = copy.deepcopy(model)
    fully_shard(model)
    model.compile(backend="fsdp", options={"lower": "eager"})
    asked: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    for _ in range(2):
        _train(model, model, reference, steps=1)
        prompt = torch.arange(1, 5)[None]
        with full_params(model, writeback=False), torch.compiler.set_stance("force_eager"):
            found = model.generate(prompt, **asked)
        assert torch.equal(found, reference.generate(prompt, **asked))
        model.unshard()
        with torch.compiler.set_stance("force_eager"):
            assert torch.equal(model.generate(prompt, **asked), found)
        model.reshard()  # the next optimizer is to have the sharded parameters
