"""transformers' Trainer with this package's callback, and its models."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from fsdp_compile import full_params, fully_shard
from fsdp_compile.errors import CheckpointError, ConfigError
from tests.fake_world import fake_world
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import close, compile_eagerly

transformers = pytest.importorskip("transformers")

_FITTING: dict[str, Any] = {
    "fsdp": [],
    "deepspeed": None,
    "torch_compile": False,
    "fp16": False,
    "save_on_each_node": False,
    "save_strategy": "steps",
    "save_only_model": True,
}


def _callback_and_model() -> tuple[Any, Any]:
    from fsdp_compile.integrations.transformers import FSDPCallback

    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(config)
    return FSDPCallback(model), model


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fsdp", ["full_shard"]),
        ("deepspeed", "zero3.json"),
        ("torch_compile", True),
        ("fp16", True),
        ("save_on_each_node", True),
        ("save_only_model", False),
    ],
)
def test_arguments_by_which_the_trainer_would_do_it_in_its_own_way_are_refused(name: str, value: Any) -> None:
    with fake_world(2):
        callback, model = _callback_and_model()
        callback.on_init_end(SimpleNamespace(**_FITTING), model=model)
        with pytest.raises(ConfigError, match=rf"{name}={'.*'} does not go with FSDPCallback"):
            callback.on_init_end(SimpleNamespace(**(_FITTING | {name: value})), model=model)


def test_another_model_and_another_kind_of_model_are_refused() -> None:
    from fsdp_compile.integrations.transformers import FSDPCallback

    with fake_world(2):
        callback, _ = _callback_and_model()
        with pytest.raises(ConfigError, match="another model than the callback"):
            callback.on_init_end(SimpleNamespace(**_FITTING), model=nn.Linear(2, 2))
        with pytest.raises(ConfigError, match="Linear is not a transformers model"):
            FSDPCallback(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_options_reach_the_backend() -> None:
    from fsdp_compile.integrations.transformers import FSDPCallback

    with fake_world(2):
        _, model = _callback_and_model()
        FSDPCallback(model, options={"lower": "nothing"})
        with pytest.raises(BackendCompilerFailed, match="option 'lower' cannot be 'nothing'"):
            model(input_ids=torch.zeros(1, 4, dtype=torch.int64))


class _Draws(transformers.TrainerCallback):  # type: ignore[name-defined]
    """Draws from each generator when a step begins, as a model does."""

    def __init__(self) -> None:
        self.drawn: dict[int, tuple[float, ...]] = {}

    def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        drawn = random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002
        self.drawn[state.global_step] = drawn


_Drawn = dict[int, tuple[float, ...]]


def _train(folder: str, steps: int, resume_from: str | None = None, rows: int = 64) -> _Drawn:
    """Trains with a batch of 8 on each rank; what was drawn at each step."""
    from fsdp_compile.integrations.transformers import FSDPCallback

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **size))
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=steps, save_steps=1, save_only_model=True, report_to=[], use_cpu=True
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 8, (rows, 4))]
    draws = _Draws()
    callbacks = [FSDPCallback(model, options={"lower": "eager"}), draws]
    transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks).train(resume_from)
    return draws.drawn


def _prepare_accelerate() -> str:
    """Sets what accelerate asks for, also beside a group; this rank."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, ACCELERATE_USE_CPU="true")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    return rank


def _resume_elsewhere(folder: str) -> None:
    rank = _prepare_accelerate()
    torch.manual_seed(0)
    here, elsewhere = f"{folder}/here", f"{folder}/elsewhere"
    for each in (here, elsewhere):
        _train(each, 1)
    _train(here, 2, f"{here}/checkpoint-1")
    with pytest.raises(ConfigError, match="a checkpoint of another run"):
        _train(here, 3, f"{elsewhere}/checkpoint-1")
    trap = Path(folder, "trap")
    if rank == "0":
        Path(here, "checkpoint-2/fsdp_state/.metadata").write_bytes(pickle.dumps(_Trap(trap)))
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"cannot load .*checkpoint-2/fsdp_state: .* io\.open, which"):
        _train(here, 3, f"{here}/checkpoint-2")
    assert not trap.exists()


class _Trap:
    """Pickled, it writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return (open, (str(self.path), "a"))


@pytest.mark.long
def test_a_checkpoint_of_another_run_and_a_hostile_one_are_not_resumed(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    run_ranks(_resume_elsewhere, str(tmp_path))


def _resume_twice(folder: str) -> list[_Drawn]:
    """A run of two epochs of two steps; one that is resumed within the first one; one that is resumed between them."""
    _prepare_accelerate()
    torch.manual_seed(0)
    whole = _train(folder, 4, rows=32)
    return [whole, *(_train(folder, 4, f"{folder}/checkpoint-{step}", rows=32) for step in (1, 2))]


@pytest.mark.long
def test_a_resumed_run_draws_what_the_run_would_have_drawn(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for whole, within, between in run_ranks(_resume_twice, str(tmp_path)):
        assert within == {step: whole[step] for step in (1, 2, 3)}
        assert between == {step: whole[step] for step in (2, 3)}


def _train_of_transformers_models(model: Any, called: Any, reference: Any, *, steps: int) -> None:
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
    _train_of_transformers_models(model, compile_eagerly(model), reference, steps=2)


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
        _train_of_transformers_models(model, model, reference, steps=1)
        prompt = torch.arange(1, 5)[None]
        with full_params(model, writeback=False), torch.compiler.set_stance("force_eager"):
            found = model.generate(prompt, **asked)
        assert torch.equal(found, reference.generate(prompt, **asked))
        model.unshard()
        with torch.compiler.set_stance("force_eager"):
            assert torch.equal(model.generate(prompt, **asked), found)
        model.reshard()  # the next optimizer is to have the sharded parameters
