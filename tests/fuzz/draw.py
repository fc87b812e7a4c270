"""Cases from seeds, and the simplest case that fails as a given one does."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from tests.fuzz.pieces import PIECES
from tests.fuzz.program import (
    ACCUMULATIONS,
    FORMS,
    LOSSES,
    OPTIMIZERS,
    OUTPUTS,
    PLACES,
    RELOADS,
    SHARDS,
    TOUCHES,
    Case,
    Layer,
    Script,
)
from tests.fuzz.run import run_programs
from tests.fuzz.verdict import Outcome

_CHOICES: dict[str, list[Any]] = {
    "form": list(FORMS),
    "shard": list(SHARDS),
    "reshard": [True, False],
    "prefetch": [1, 0, 2, "auto", "BACKWARD_PRE", "BACKWARD_POST"],
    "bucket_mb": [0, "auto", 1],
    "dynamic": [None, False, True],
    "output": list(OUTPUTS),
    "loss": ["one forward", "one forward", *LOSSES],
    "steps": [2, 3, 4],
    "accumulation": ["one microbatch", *ACCUMULATIONS],
    "optimizer": list(OPTIMIZERS),
    "clip": [False, True],
    "zeros": [False, True],
    "freezes": [False, False, False, True],
    "evaluates": [False, False, True],
    "sizes": ["same", "same", "by step", "by rank"],
    "reduce_layout": ["aligned", "fsdp2"],
    "half": [False, True],
    "touch": list(TOUCHES),
    "flat_step": [False, True],
    "reload": ["nothing", *RELOADS],
}
"""Values of `Script`; two in three fields of a case have their simplest one."""
_SLOW_WITH_OPEN_SIZES = {"attention", "own_attention", "encoder_layer", "gru_cell", "lstm_cell", "instance_norm"}


_NOT_IN_HALF = {
    *("half_linear", "autocast", "batch_norm", "spectral_norm", "buffer", "running_mean", "counter", "own_function"),
    "instance_norm",
}
"""Pieces that do not run in bfloat16 with buffers, or other tensors, in float32; and a norm over three numbers, whose
gradients bfloat16 rounds by a quarter."""
_UPDATES_BUFFERS = {"batch_norm", "running_mean", "counter", "spectral_norm"}
"""Pieces that a checkpoint updates twice in eager code and once in compiled code, torch's own as well."""


def draw(seed: int) -> Case:
    """The case of a seed, the same in every run and on every machine."""
    chance = random.Random(seed)
    places = ["block", "block", *PLACES]
    drawn = [Layer(chance.choice(list(PIECES)), chance.choice(places)) for _ in range(chance.choice([1, 2, 2, 3, 4]))]
    layers = tuple(
        Layer(layer.piece) if layer.place == "checkpointed" and layer.piece in _UPDATES_BUFFERS else layer
        for layer in drawn
    )
    chosen = {name: chance.choice(values) for name, values in _CHOICES.items() if chance.random() < 0.35}
    if len(layers) > 2 or any(layer.piece in _SLOW_WITH_OPEN_SIZES for layer in layers):
        chosen.pop("dynamic", None)
    if any(layer.piece in _NOT_IN_HALF for layer in layers):
        chosen.pop("half", None)
    return Case(layers, _possible(Script(**chosen)))


def _possible(script: Script) -> Script:
    """Without what has no meaning together."""
    if script.shard != "nothing":
        return script
    if script.form in ("nothing", "model.compile()") or script.half:
        # The first call of a plain model has begun before it is sharded, so its inputs cannot be cast.
        return dataclasses.replace(script, shard="model")
    if script.accumulation in ("set_requires_gradient_sync", "reduced each, unsharded until the last one"):
        return dataclasses.replace(script, accumulation="no_sync")  # plain modules have no such methods
    return script


def simpler(case: Case) -> Iterator[Case]:
    """Cases that are one choice simpler, the largest differences first."""
    simplest = Script()
    for field in dataclasses.fields(Script):
        default = getattr(simplest, field.name)
        if getattr(case.script, field.name) != default:
            script = dataclasses.replace(case.script, **{field.name: default})
            if _possible(script) == script:
                yield dataclasses.replace(case, script=script)
    for i in range(len(case.layers)):
        if len(case.layers) > 1:
            yield dataclasses.replace(case, layers=case.layers[:i] + case.layers[i + 1 :])
    for i, layer in enumerate(case.layers):
        for other in (Layer(layer.piece), Layer("linear", layer.place)):
            if other != layer and (other.piece == layer.piece or layer.piece != "linear"):
                yield dataclasses.replace(case, layers=(*case.layers[:i], other, *case.layers[i + 1 :]))


def shrink(case: Case, outcome: Outcome, *, at_most: int = 60) -> tuple[Case, Outcome]:
    """Takes the first simpler case that fails alike, again and again; runs so many cases at most."""
    tried = {case}
    while True:
        left = [other for other in simpler(case) if other not in tried]
        for other in left:
            if len(tried) > at_most:
                return case, outcome
            tried.add(other)
            found = next(run_programs([other.text()]))
            if found.is_like(outcome):
                case, outcome = other, found
                break
        else:
            return case, outcome
