"""Runs programs on the pool of ranks, several in one call, beside one process in float64 and in float32."""

from __future__ import annotations

import dataclasses
import linecache
import logging
import math
import sys
import types
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from fsdp_compile import fully_shard
from tests.fuzz.sides import Fsdp2Ranks, OneProcess, Ranks, Side
from tests.fuzz.verdict import Outcome, Verdict, of_error, of_notes, worst
from tests.rank_worker import reset_torch
from tests.ranks import RankError, run_ranks

WORLD_SIZE = 2
TIMEOUT_S = 180.0
PER_CALL = 8


class Contender(StrEnum):
    """What is compared with one process."""

    HERE = "fsdp_compile"
    FSDP2 = "FSDP2, not compiled"
    AOT = "torch.compile(backend='aot_eager') in one process"


class CaseError(Exception):
    """A case ended in an error on one rank: the others may wait for it, so the call ends.

    Args:
        before: Outcomes of the cases before it, on that rank.
        outcome: Its outcome.
    """

    def __init__(self, before: list[Outcome], outcome: Outcome) -> None:
        super().__init__(before, outcome)
        self.before = before
        self.outcome = outcome


def run_programs(texts: list[str], contender: Contender = Contender.HERE) -> Iterator[Outcome]:
    """The outcome of each program, in order."""
    left = list(texts)
    while left:
        for outcome in _call(left[:PER_CALL], contender):
            text = left.pop(0)
            yield _beside_fsdp2(text, outcome) if contender is Contender.HERE else outcome


def _beside_fsdp2(text: str, mine: Outcome) -> Outcome:
    """The verdict on a program that computes in bfloat16, where FSDP2 may miss the numbers of one process, too.

    One process that rounds otherwise than ranks do does not tell what rounding allows there: one bit of bfloat16 more
    or less is 2**16 times one of float32. Other orders of additions than FSDP2's may double its distance.
    """
    if mine.verdict is Verdict.WRONG and "bfloat16" in text:
        fsdp2 = next(run_programs([text], Contender.FSDP2))
        if fsdp2.verdict is Verdict.WRONG and mine.excess <= 2 * fsdp2.excess < math.inf:
            return dataclasses.replace(mine, verdict=Verdict.AS_FSDP2)
    return mine


def _call(texts: list[str], contender: Contender) -> list[Outcome]:
    """Outcomes of the first programs, of one at least: an error ends the call."""
    world = 1 if contender is Contender.AOT else WORLD_SIZE
    try:
        by_rank = run_ranks(run_on_rank, texts, contender, world_size=world, timeout_s=TIMEOUT_S + 5 * len(texts))
    except CaseError as error:
        # Other ranks' outcomes are lost, but what differs on one rank alone is rare, and the next cases are there.
        return [*error.before, error.outcome]
    except RankError as error:
        if len(texts) == 1:
            died = "died:" in str(error)
            return [Outcome(Verdict.CRASHED if died else Verdict.HUNG, str(error).splitlines()[0], str(error))]
        return [next(run_programs([text], contender)) for text in texts]
    return [worst(list(outcomes)) for outcomes in zip(*by_rank, strict=True)]


def run_on_rank(texts: list[str], contender: Contender) -> list[Outcome]:
    """All programs on one rank."""
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # graph breaks are among what is tested
    found: list[Outcome] = []
    for number, text in enumerate(texts):
        reset_torch()
        program = load(text, f"fuzz_{number}")
        try:
            exact, single = (_one_process(program, dtype).notes for dtype in (torch.float64, torch.float32))
        except Exception as error:
            found.append(Outcome(Verdict.INVALID, f"{type(error).__name__}: {error}", of_error(error).details))
            continue
        try:
            mine = _contend(program, contender).notes
        except BaseException as error:
            raise CaseError(found, of_error(error)) from None
        found.append(of_notes(mine, exact, single, slack=getattr(program, "SLACK", 1e-5)))
    return found


def load(text: str, name: str) -> Any:
    """The module of a program's text, with lines for tracebacks."""
    program = types.ModuleType(name)
    file = f"<{name}>"
    sys.modules[name] = program  # Dynamo imports the modules of inlined functions
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), program.__dict__)
    return program


def _one_process(program: Any, dtype: torch.dtype) -> Side:
    backend, program.BACKEND = program.BACKEND, {"backend": "eager"}  # for what a script compiles beside the model
    model = _model(program)
    if dtype is torch.float64:
        model = model.double()
    side = OneProcess(model, WORLD_SIZE, dtype)
    try:
        return _trained(program, model, lambda x, ids: program.loss(model(x, ids)), side)
    finally:
        program.BACKEND = backend


def _contend(program: Any, contender: Contender) -> Side:
    model = _model(program)
    if contender is Contender.AOT:
        program.BACKEND = {k: v for k, v in program.BACKEND.items() if k != "options"} | {"backend": "aot_eager"}
        return _trained(program, model, program.compiled(model), OneProcess(model, WORLD_SIZE, torch.float32))
    if contender is Contender.HERE:
        program.shard(model, fully_shard)
        return _trained(program, model, program.compiled(model), Ranks(model))
    program.BACKEND = {"backend": "eager"}
    for module in model.modules():  # FSDP2's units have one dtype each
        if any(parameter.dtype is torch.bfloat16 for parameter in module.parameters(recurse=False)):
            torchs_fully_shard(module)
    program.shard(model, torchs_fully_shard)
    if not hasattr(model, "set_requires_gradient_sync"):
        torchs_fully_shard(model)
    return _trained(program, model, lambda x, ids: program.loss(model(x, ids)), Fsdp2Ranks(model))


def _trained(program: Any, model: nn.Module, call: Any, side: Side) -> Side:
    program.train(model, call, side)
    side.see_the_end()
    return side


def _model(program: Any) -> nn.Module:
    torch.manual_seed(0)
    return program.Model()
