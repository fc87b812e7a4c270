"""The learning rate of every step, against arithmetic done by hand."""

from __future__ import annotations

import pytest

from fsdp_compile.training.config import Schedule, TrainConfig

SCHEDULE = Schedule.of(TrainConfig(steps=100, learning_rate=0.008, warmup_ratio=0.2, final_ratio=0.25))


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
    assert SCHEDULE(step) == pytest.approx(rate, rel=1e-12)


def test_rises_and_falls_without_a_jump() -> None:
    rates = [SCHEDULE(step) for step in range(1, 101)]
    assert rates[:20] == sorted(rates[:20])
    assert rates[19:] == sorted(rates[19:], reverse=True)


def test_without_a_rise_the_fall_begins_at_once() -> None:
    schedule = Schedule.of(TrainConfig(steps=2, learning_rate=1.0, warmup_ratio=0, final_ratio=0))
    assert [schedule(1), schedule(2)] == pytest.approx([0.5, 0])


def test_all_steps_may_rise() -> None:
    schedule = Schedule.of(TrainConfig(steps=4, learning_rate=1.0, warmup_ratio=1))
    assert [schedule(step) for step in range(1, 5)] == pytest.approx([0.25, 0.5, 0.75, 1])
