"""Drawn programs train like one process, or are refused by name; and the fuzzer sees what is wrong."""

from __future__ import annotations

import math
import os

import pytest

from tests import long
from tests.fuzz.__main__ import fuzz, report
from tests.fuzz.draw import draw, shrink, simpler
from tests.fuzz.program import Case, Layer, Script
from tests.fuzz.run import Contender, run_programs
from tests.fuzz.verdict import GOOD, Outcome, Verdict
from tests.ranks import run_ranks  # noqa: F401  these tests need ranks

LONG = os.environ.get("FSDP_COMPILE_LONG", "") not in ("", "0")
# A number of cases, not of seconds: the same cases on a fast machine. `python -m tests.fuzz` draws others.
CASES = 24 if LONG else 1
SECONDS_PER_CASE = 30
MOST_REFUSED = 0.02


@pytest.mark.timeout(SECONDS_PER_CASE * CASES + 600)
def test_drawn_programs_train_like_one_process() -> None:
    refused = 0
    for seed, outcome in fuzz(range(CASES)):
        refused += outcome.verdict is Verdict.REFUSED
        if outcome.verdict not in GOOD:
            pytest.fail(f"seed {seed}\n{report(*shrink(draw(seed), outcome))}", pytrace=False)
    assert refused <= max(2, MOST_REFUSED * CASES)


VERDICTS = [
    ("optimizer.step()", "optimizer.step()\n        side.note('rank', torch.tensor(float(side.rank)))", "wrong"),
    ("side.backward(call(x, ids))", "side.backward((1 + side.rank) * call(x, ids))", "equal"),
    ("loss(module(x, ids))", "loss(module(x, ids)) if step else 0", "crashed"),
    ("torch.compile(model, **BACKEND)", "torch.compile(model, backend='fsdp', options={'no': 1})", "refused"),
    ("return self.head(x.tanh())", "return self.head(x, 3)", "invalid"),
]
"""A line of a program, what takes its place, and the verdict: one of each."""
OTHER_VERDICTS = [
    ("side.see_gradients(model)", "side.see_gradients(model)\n        model.head.bias.grad = None", "equal"),
    ("loss(module(x, ids))", "1.001 * loss(module(x, ids))", "wrong"),
    ("torch.compile(model, **BACKEND)", "model", "wrong"),
    ("self.head(x.tanh())", "self.head(x) / 0", "invalid"),
]


@long.parametrize(("line", "other", "verdict"), [*VERDICTS, *OTHER_VERDICTS], always=VERDICTS)
def test_verdicts(line: str, other: str, verdict: str) -> None:
    text = Case((Layer("linear"),)).text()
    assert line in text
    (outcome,) = run_programs([text.replace(line, other)])
    assert outcome.verdict == verdict, outcome


@pytest.mark.parametrize(
    ("fsdp2", "verdict"), [(2.0, Verdict.AS_FSDP2), (1.4, Verdict.WRONG), (math.inf, Verdict.WRONG)]
)
def test_what_bfloat16_rounds_is_measured_by_fsdp2(
    fsdp2: float, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def call(texts: list[str], contender: Contender) -> list[Outcome]:
        asked.append(contender)
        excess = 3.0 if contender is Contender.HERE else fsdp2
        return [Outcome(Verdict.WRONG, "loss: differs by 0.2, and 0.1 is rounding", "", excess) for _ in texts]

    monkeypatch.setattr("tests.fuzz.run._call", call)
    outcomes = run_programs(["torch.bfloat16", "torch.float32"])
    assert [outcome.verdict for outcome in outcomes] == [verdict, Verdict.WRONG]
    assert asked == [Contender.HERE, Contender.FSDP2]


@pytest.mark.long
def test_a_case_that_ends_in_an_error_does_not_take_the_others_along() -> None:
    text = Case((Layer("linear"),)).text()
    on_one_rank = text.replace("optimizer.step()", "optimizer.step() if side.world == 1 or not side.rank else 1 / 0")
    texts = [text, text.replace("module(x, ids)", "1 / 0"), text, on_one_rank, text]
    verdicts = [outcome.verdict for outcome in run_programs(texts)]
    assert [verdicts[0], verdicts[2], verdicts[4]] == [Verdict.EQUAL] * 3
    assert verdicts[1] is Verdict.CRASHED
    assert verdicts[3] in (Verdict.CRASHED, Verdict.INVALID)


def test_drawn_programs_are_the_same_in_every_run() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({draw(seed) for seed in range(50)}) > 45


def test_every_simpler_case_is_a_program() -> None:
    for seed in range(40):
        for case in (draw(seed), *simpler(draw(seed))):
            compile(case.text(), "case", "exec")


def test_failures_shrink_to_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        (Layer("mlp", "shared"), Layer("gram", "list"), Layer("linear")),
        Script(steps=4, accumulation="no_sync", clip=True),
    )

    class Fails:
        verdict = Verdict.WRONG

        def __init__(self, text: str) -> None:
            self.fails = "no_sync" in text and "self.w" in text

        def is_like(self, _other: object) -> bool:
            return self.fails

    monkeypatch.setattr("tests.fuzz.draw.run_programs", lambda texts: iter([Fails(texts[0])]))
    smallest, _ = shrink(case, Fails(case.text()))  # type: ignore[arg-type]
    assert smallest == Case((Layer("gram"),), Script(accumulation="no_sync"))
