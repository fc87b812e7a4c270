"""The combinations that are trained beside FSDP2 eager."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile.parity.experiment import Accumulation, Experiment, Level
from tests.models.matrix import MODELS, make_batch

WORLD_SIZES = (1, 2, 4)
PRECISIONS = {
    "fp32": MixedPrecisionPolicy(),
    "bf16/fp32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
RECOMPUTES = {"kept": False, "recomputed": True}
ACCUMULATIONS = {
    "no accumulation": (1, Accumulation.REDUCE_EACH),
    "2 reduced": (2, Accumulation.REDUCE_EACH),
    "2 held": (2, Accumulation.HOLD),
}
"""Micro-batches per step, and what happens to their gradients."""


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How a model is spread over the ranks: mesh `[replicas, ranks / replicas]`."""

    replicas: int
    reshard: bool


ONE_RANK = {"full": Strategy(1, reshard=True), "ZeRO-2": Strategy(1, reshard=False)}
HYBRID = {"hybrid": Strategy(2, reshard=True), "hybrid ZeRO-2": Strategy(2, reshard=False)}
STRATEGIES = {
    1: ONE_RANK,
    2: {**ONE_RANK, "replicated": Strategy(2, reshard=True)},
    4: {**ONE_RANK, **HYBRID, "replicated": Strategy(4, reshard=True)},
}
"""By number of ranks."""


@dataclasses.dataclass(frozen=True)
class Combination:
    """One training that is compared."""

    model: str  # key of `MODELS`
    recompute: str  # key of `RECOMPUTES`
    strategy: str  # key of `STRATEGIES[world_size]`
    precision: str  # key of `PRECISIONS`
    accumulation: str  # key of `ACCUMULATIONS`
    world_size: int  # number of ranks

    @property
    def key(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return ", ".join([*dataclasses.astuple(self)[:-1], ranks])

    @property
    def _adds_as_fsdp2_does(self) -> bool:
        replicas = STRATEGIES[self.world_size][self.strategy].replicas
        # More than two contributions gloo adds in an order that depends on their place in the message.
        few = self.world_size // replicas <= 2 and replicas <= 2
        # Of a unit called twice FSDP2 reduces what is held by itself, when the backward of the second call has ended.
        twice = self.model == "repeated" and self.accumulation == "2 held" and self.world_size > 1
        return few and not twice

    def experiment(self, *, steps: int = 3, lower: str = "eager", **options: Any) -> Experiment:
        """The comparison with FSDP2, bit by bit where at most two ranks add."""
        strategy = STRATEGIES[self.world_size][self.strategy]
        micro_batches, accumulation = ACCUMULATIONS[self.accumulation]
        bitwise = lower == "eager" and self._adds_as_fsdp2_does
        return Experiment(
            make_model=functools.partial(MODELS[self.model], recompute=RECOMPUTES[self.recompute]),
            make_batch=make_batch,
            world_size=self.world_size,
            level=Level.BITWISE if bitwise else Level.TOLERANCE,
            steps=steps,
            options={"lower": lower, **options},
            mp_policy=PRECISIONS[self.precision],
            reshard_after_forward=strategy.reshard,
            replicas=strategy.replicas,
            micro_batches=micro_batches,
            accumulation=accumulation,
        )


def full_product() -> Iterator[Combination]:
    """Everything with everything; hybrid sharding needs 4 ranks to shard at all."""
    for world_size in WORLD_SIZES:
        for values in itertools.product(MODELS, RECOMPUTES, STRATEGIES[world_size], PRECISIONS, ACCUMULATIONS):
            yield Combination(*values, world_size)


def covering() -> list[Combination]:
    """A part of the product in which every pair of values occurs that occurs in the product."""
    candidates = list(full_product())
    missing = set().union(*map(_pairs, candidates))
    chosen = []
    while missing:
        best = max(candidates, key=lambda one: (len(missing & _pairs(one)), -one.world_size))
        chosen.append(best)
        missing -= _pairs(best)
    return sorted(chosen, key=lambda one: one.world_size)


def _pairs(one: Combination) -> set[tuple[tuple[str, object], ...]]:
    return set(itertools.combinations(dataclasses.asdict(one).items(), 2))
