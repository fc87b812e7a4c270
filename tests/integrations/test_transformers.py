"""`FSDPCallback` refuses what does not go with it; `test_frameworks.py` trains with it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile.errors import CheckpointError, ConfigError
from tests.fake_world import fake_world
from tests.ranks import run_ranks

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
        with pytest.raises(ConfigError, match="'nothing'"):
            model(input_ids=torch.zeros(1, 4, dtype=torch.int64))


def _train(folder: str, steps: int, resume_from: str | None = None) -> None:
    from fsdp_compile.integrations.transformers import FSDPCallback

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **size))
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=steps, save_steps=1, save_only_model=True, report_to=[], use_cpu=True
    )
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 8, (64, 4))]
    callback = FSDPCallback(model, options={"lower": "eager"})
    transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train(resume_from)


def _resume_elsewhere(folder: str) -> None:
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, ACCELERATE_USE_CPU="true")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")  # accelerate asks for it, also beside a group
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


def test_a_checkpoint_of_another_run_and_a_hostile_one_are_not_resumed(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    run_ranks(_resume_elsewhere, str(tmp_path))
