"""`FSDPCallback` refuses what does not go with it; `test_frameworks.py` trains with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compile.errors import ConfigError
from tests.fake_world import fake_world

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
