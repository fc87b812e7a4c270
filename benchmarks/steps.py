"""One training step of each contender on one task, ready to be timed."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from benchmarks.contenders import Contender, Setup
from benchmarks.measure import Samples, recorded
from benchmarks.models import Task


@dataclasses.dataclass
class Prepared:
    """A contender with its model.

    Attributes:
        model: The module that holds the parameters.
        called: What is called in its place.
        task: What is trained.
    """

    model: nn.Module
    called: Any
    task: Task

    def step(self) -> None:
        """Forward and backward; gradients of the step before are dropped first.

        The outputs are held meanwhile, as most training loops do: `out = model(x); loss(out).backward()`.
        """
        self.model.zero_grad(set_to_none=True)
        outputs = self.task.forward(self.called)
        self.task.loss(outputs).backward()


def prepare(
    contenders: Iterable[Contender], task: Task, setup: Setup, *, limit_s: float = math.inf
) -> tuple[dict[str, Prepared], dict[str, Samples]]:
    """Makes a model for each contender and runs its first step, which compiles.

    Args:
        contenders: In this order.
        task: What is trained.
        setup: What contenders may know.
        limit_s: After so long no further contender is begun.

    Returns:
        Those that ran, and the errors of those that did not.
    """
    ready: dict[str, Prepared] = {}
    failed: dict[str, Samples] = {}
    start_s = time.monotonic()
    for contender in contenders:
        samples = Samples()
        with recorded(samples):
            if time.monotonic() - start_s > limit_s:
                raise TimeoutError("no time was left to compile it")
            model = task.make()
            prepared = Prepared(model, contender.prepare(model, setup), task)
            prepared.step()
            ready[contender.name] = prepared
        if samples.error is not None:
            failed[contender.name] = samples
    return ready, failed


def forget_compiles() -> None:
    """Empties Dynamo's caches, so that the next section compiles by itself."""
    torch.compiler.reset()
