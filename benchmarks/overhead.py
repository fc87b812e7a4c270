"""What a step costs besides computing and communicating: 40 tiny layers, 200 parameters, a group that does nothing.

Forward and backward, and the optimizer's step, apart; each beside plain `torch.compile` and plain tensors.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp_compile
from benchmarks import contenders, models
from benchmarks._torch import fake_store
from benchmarks.command import Columns, finish, ms, parser, quiet, table
from benchmarks.contenders import FSDP2, FSDP2_COMPILED, OURS, UNSHARDED, Contender, Setup
from benchmarks.measure import Run, Samples, alternate, median_ratio
from benchmarks.steps import Prepared, prepare


def _apart(model: nn.Module, setup: Setup) -> Any:
    return contenders.ours(model, dataclasses.replace(setup, options={**setup.options, "bucket_mb": 0}))


_FLAT_STEP = dataclasses.replace(OURS, name="fsdp_compile_flat_step", about="flat_step() on the optimizer")
_APART = Contender("fsdp_compile_units_apart", "bucket_mb=0: collectives of its own for each unit", _apart, OURS.held)
_CONTENDERS = (UNSHARDED, FSDP2, FSDP2_COMPILED, OURS, _FLAT_STEP, _APART)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("overhead", "Host time of a step of tiny layers: forward and backward, and the optimizer.")
    made.add_argument("--layers", type=int, default=40, metavar="N", help="layers of 5 parameters (default: 40)")
    made.add_argument("--ranks", type=int, default=8, metavar="N", help="ranks of the fake group (default: 8)")
    made.add_argument("--rounds", type=int, default=200, metavar="N", help="steps of each contender (default: 200)")
    arguments = made.parse_args(argv)
    quiet()
    if arguments.smoke:
        arguments.layers, arguments.rounds = 2, 3
    rows = run(arguments.layers, arguments.ranks, arguments.rounds)
    columns: Columns = {
        "contender": str,
        "step_s": ms,
        "step_ratio": _times,
        "optimizer_s": ms,
        "optimizer_ratio": _times,
    }
    table("medians, and medians of each round's ratio to plain torch.compile and plain tensors", rows, columns)
    settings = {"layers": arguments.layers, "ranks": arguments.ranks, "rounds": arguments.rounds}
    return finish(arguments, settings, rows)


def run(layers: int, ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Measures all contenders."""
    task = models.tiny_stack(layers)
    with _fake_world(ranks):
        ready, failed = prepare(_CONTENDERS, task, Setup(task.block))
        steps = alternate({name: prepared.step for name, prepared in ready.items()}, rounds=rounds, warm_up=5)
        optimizers = alternate({name: _optimizer_step(name, ready[name]) for name in ready}, rounds=rounds)
    rows = [_row(name, steps, optimizers) for name in ready]
    return rows + [{"contender": name, **samples.to_dict()} for name, samples in failed.items()]


def _optimizer_step(name: str, prepared: Prepared) -> Run:
    """A step of AdamW on the gradients that are there."""
    optimizer = torch.optim.AdamW(prepared.model.parameters(), foreach=True)
    return (fsdp_compile.flat_step(optimizer) if name == _FLAT_STEP.name else optimizer).step


def _row(name: str, steps: Mapping[str, Samples], optimizers: Mapping[str, Samples]) -> dict[str, Any]:
    plain = contenders.UNSHARDED.name
    row: dict[str, Any] = {"contender": name}
    for what, samples in (("step", steps), ("optimizer", optimizers)):
        if samples[name].error is not None:
            row["error"] = samples[name].error
            continue
        row[f"{what}_s"] = samples[name].median_s
        row[f"{what}_ratio"] = median_ratio(samples[name], samples[plain])
    return row


def _times(ratio: float) -> str:
    return f"{ratio:.2f} x"


@contextmanager
def _fake_world(ranks: int) -> Iterator[None]:
    store = fake_store()
    dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
