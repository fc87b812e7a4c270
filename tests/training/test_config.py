"""Options of a run: bounds, JSON, what a resumed run may change; the learning rate, against arithmetic by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from fsdp_compile.errors import ConfigError
from fsdp_compile.training.config import MixedPrecision, TrainConfig

RISE_AND_FALL = TrainConfig(steps=100, learning_rate=0.008, warmup_ratio=0.2, final_ratio=0.25)


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"steps": 0}, "--steps"),
        ({"batch_size": 0}, "--batch-size"),
        ({"seq_len": 1}, "--seq-len"),
        ({"layers": 0}, "--layers"),
        ({"heads": 3}, "--width, --heads"),
        ({"width": 12, "heads": 4}, "--width, --heads"),  # three features a head: rotary positions need pairs
        ({"learning_rate": 0.0}, "--learning-rate"),
        ({"learning_rate": float("nan")}, "--learning-rate"),
        ({"learning_rate": float("inf")}, "--learning-rate"),
        ({"learning_rate": 1e38}, "--learning-rate"),  # a step size beyond float32
        ({"weight_decay": 1e300}, "--weight-decay"),
        ({"replicas": 0}, "--replicas"),
        ({"warmup_ratio": 1.1}, "--warmup-ratio"),
        ({"final_ratio": -0.1}, "--final-ratio"),
        ({"clip_norm": 0.0}, "--clip-norm"),
        ({"seed": -1}, "--seed"),
        ({"seed": 2**64}, "--seed"),
        ({"log_every": 0}, "--log-every"),
        ({"eval_batches": 0}, "--eval-batches"),
        ({"checkpoint_every": 0}, "--checkpoint-every"),
    ],
)
def test_an_impossible_value_is_refused_where_it_was_given(options: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**options)
    assert f"\n  where: {place}\n  instead: " in str(caught.value)


def test_options_come_back_from_json() -> None:
    config = TrainConfig(mixed_precision=MixedPrecision.BF16, data="text", learning_rate=0.5)
    back = TrainConfig(**json.loads(json.dumps(asdict(config))))
    assert back == config
    assert back.mixed_precision is MixedPrecision.BF16


def test_a_resumed_run_may_train_longer_but_not_something_else() -> None:
    config = TrainConfig(steps=10, width=32)
    assert config.resumed_with({"steps": 20, "width": 32}) == TrainConfig(steps=20, width=32)
    with pytest.raises(ConfigError, match=r"was started with 32.*\n  where: --width"):
        config.resumed_with({"width": 64})


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (1, 0.0004),  # a twentieth
        (10, 0.004),  # half of the rise
        (20, 0.008),  # its end
        (40, 0.002 + 0.006 * 0.8535533905932737),  # a quarter of the fall: (1 + cos 45 degrees) / 2
        (60, 0.005),  # half of the fall: the mean of 0.008 and 0.002
        (80, 0.002 + 0.006 * 0.14644660940672627),
        (100, 0.002),  # a quarter of the highest
    ],
)
def test_rises_in_a_line_and_falls_along_a_cosine(step: int, rate: float) -> None:
    assert RISE_AND_FALL.learning_rate_of(step) == pytest.approx(rate, rel=1e-12)


def test_without_a_rise_the_fall_begins_at_once_and_all_steps_may_rise() -> None:
    config = TrainConfig(steps=2, learning_rate=1.0, warmup_ratio=0, final_ratio=0)
    assert [config.learning_rate_of(1), config.learning_rate_of(2)] == pytest.approx([0.5, 0])
    config = TrainConfig(steps=4, learning_rate=1.0, warmup_ratio=1)
    assert [config.learning_rate_of(step) for step in range(1, 5)] == pytest.approx([0.25, 0.5, 0.75, 1])
