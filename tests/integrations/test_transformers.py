"""transformers' Trainer with this package's callback, and its models."""

from __future__ import annotations

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
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import Run, WithOneProcess, compile_in_place

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


def _llama(vocabulary: int = 8) -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocabulary, **sizes))


def _callback(model: Any, **options: Any) -> Any:
    from fsdp_compile.integrations.transformers import FSDPCallback

    return FSDPCallback(model, options=options)


@pytest.mark.usefixtures("world")
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
    model = _llama()
    callback = _callback(model)
    callback.on_init_end(SimpleNamespace(**_FITTING), model=model)
    with pytest.raises(ConfigError, match=rf"{name}={'.*'} does not go with FSDPCallback"):
        callback.on_init_end(SimpleNamespace(**(_FITTING | {name: value})), model=model)


@pytest.mark.usefixtures("world")
def test_another_model_and_another_kind_of_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="another model than the callback"):
        _callback(_llama()).on_init_end(SimpleNamespace(**_FITTING), model=nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="Linear is not a transformers model"):
        _callback(nn.Linear(2, 2))


@pytest.mark.usefixtures("world")
def test_options_reach_the_backend() -> None:
    model = _llama()
    _callback(model, lower="nothing")
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
    model = _llama()
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=steps, save_steps=1, save_only_model=True, report_to=[], use_cpu=True
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 8, (rows, 4))]
    draws = _Draws()
    callbacks = [_callback(model, lower="eager"), draws]
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


def _loss(call: Any, rows: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = call(input_ids=rows, labels=rows).loss
    return loss


def _tokens(step: int) -> torch.Tensor:
    return torch.randint(1, 32, (4, 8), generator=torch.Generator().manual_seed(step))


_TRAINED: dict[str, Any] = {
    "loss": _loss,
    "batch": _tokens,
    "twice": False,
    "optimizer": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
}


def _t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=32, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    )


def _shard_t5(model: nn.Module, *, by_policy: bool) -> None:
    """As pytorch/examples trains it with FSDP1: a policy over `T5Block`; or FSDP2's calls, bottom-up."""
    from transformers.models.t5.modeling_t5 import T5Block

    if by_policy:
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
        fully_shard(model, auto_wrap_policy=policy)
        return
    for module in model.modules():
        if isinstance(module, T5Block):
            fully_shard(module)
    fully_shard(model)


@pytest.mark.long
@pytest.mark.parametrize("by_policy", [True, False])
@on_ranks()
def test_t5_equals_one_process(*, by_policy: bool) -> None:
    WithOneProcess(_t5, shard=functools.partial(_shard_t5, by_policy=by_policy), **_TRAINED).train()


@pytest.mark.long
@on_ranks()
def test_generation_during_training_equals_one_process() -> None:
    sides = WithOneProcess(functools.partial(_llama, 32), Run.EAGER, **_TRAINED)
    model = compile_in_place(sides.model)
    asked: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    prompt = torch.arange(1, 5)[None]
    for _ in range(2):
        sides.train(steps=1)
        expected = sides.reference.generate(prompt, **asked)
        with full_params(model, writeback=False), torch.compiler.set_stance("force_eager"):
            assert torch.equal(model.generate(prompt, **asked), expected)
        model.unshard()
        with torch.compiler.set_stance("force_eager"):
            assert torch.equal(model.generate(prompt, **asked), expected)
        model.reshard()  # the next optimizer is to have the sharded parameters
