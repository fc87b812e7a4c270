"""Models of transformers train like FSDP2 eager; those that need minutes on request.

FSDP_COMPILE_ARCHITECTURES=1 pytest tests/numerics/fsdp2/test_architectures.py
"""

from __future__ import annotations

import dataclasses
import os

import pytest

from fsdp_compile.parity.experiment import Experiment, Level, Reference, sgd
from fsdp_compile.parity.train import train_both
from tests.models.architectures import ARCHITECTURES, ShardBlocks
from tests.numerics.fsdp2.matrix import PRECISIONS
from tests.numerics.fsdp2.results import Judge
from tests.ranks import run_ranks

LIMIT_S = 300
"""Of one training, which takes 5 to 25 s on two cores that do little else."""
SHORT = "decoder (Llama)"
"""Takes less than others: trained in the long tests."""


def _experiment(name: str, precision: str) -> Experiment:
    one = Experiment(
        make_model=ARCHITECTURES[name].make_model,
        make_batch=ARCHITECTURES[name].make_batch,
        world_size=2,
        steps=2,
        options={"lower": "eager"},
        mp_policy=PRECISIONS[precision],
        timeout_s=LIMIT_S,
    )
    if name == "vision (ViT)":
        # It asks for the dtype of a weight of its first layer, which in a unit of its own FSDP2 has not gathered yet.
        return dataclasses.replace(one, prepare=ShardBlocks("ViTLayer", one.mp_policy))
    if name == "encoder-decoder (T5)" and precision == "fp32":
        # FSDP2 adds up what one decoder block sends back to the encoder before it adds blocks; DDP does not.
        return dataclasses.replace(one, reference=Reference.DDP)
    if name == "encoder-decoder (T5)":
        return dataclasses.replace(one, level=Level.TOLERANCE, optimizer=sgd)
    return one


def _key(name: str, precision: str) -> str:
    one = _experiment(name, precision)
    return f"{name}, {precision}, beside {one.reference.value}"


SECTION = "Architectures of transformers"
CASES = [(name, precision) for name in ARCHITECTURES for precision in PRECISIONS]
KEYS = [_key(*case) for case in CASES]
SECTIONS = {SECTION: KEYS}
ON_REQUEST = [
    pytest.mark.optional,
    pytest.mark.skipif("FSDP_COMPILE_ARCHITECTURES" not in os.environ, reason="FSDP_COMPILE_ARCHITECTURES=1 trains it"),
]


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return ON_REQUEST if name != SHORT else [pytest.mark.long]


@pytest.mark.parametrize(
    ("name", "precision"), [pytest.param(*case, id=", ".join(case), marks=_marks(case[0])) for case in CASES]
)
def test_an_architecture_trains_like_the_reference(name: str, precision: str, judge: Judge) -> None:
    pytest.importorskip("transformers")
    found = run_ranks(train_both, _experiment(name, precision), world_size=2, timeout_s=LIMIT_S)[0]
    judge(SECTION, KEYS, _key(name, precision), found)
