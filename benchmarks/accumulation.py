"""Steps of several microbatches, reduced once: all-gathers, memory and time with and without parameters that stay."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benchmarks import contenders, models
from benchmarks.bound import Held
from benchmarks.command import Columns, finish, mib, ms, parser, quiet, table
from benchmarks.contenders import FSDP2, OURS, Contender, Setup
from benchmarks.hardware import timed, told
from benchmarks.measure import alternate
from benchmarks.models import Task
from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.traffic import Kind
from benchmarks.network.wire import Link
from benchmarks.peak import measured_peak_bytes
from benchmarks.step_time import add_network_arguments
from benchmarks.steps import prepare


def accumulating(task: Task, microbatches: int) -> Task:
    """A step of several microbatches, of which the last one reduces."""

    def forward(model: Any) -> Any:
        model.set_requires_gradient_sync(False)
        for _ in range(microbatches - 1):
            task.loss(task.forward(model)).backward()
        model.set_requires_gradient_sync(True)
        return task.forward(model)

    return dataclasses.replace(task, forward=forward)


def _kept(model: nn.Module, setup: Setup) -> Any:
    return contenders.ours(model, dataclasses.replace(setup, reshard_after_forward=False))


CONTENDERS: tuple[Contender, ...] = (
    FSDP2,
    dataclasses.replace(OURS, about="each microbatch gathers each unit twice"),
    Contender("fsdp_compile_kept", "reshard_after_forward=False: one gather for all", _kept, Held.GATHERED),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = _parser().parse_args(argv)
    quiet()
    torch.set_num_threads(arguments.threads)
    if arguments.smoke:
        arguments.rounds = 2
    task = accumulating(models.llama(models.SMOKE if arguments.smoke else models.TWO_CORES), arguments.microbatches)
    rows = run(task, arguments, Setup(task.block, options=arguments.fsdp_options))
    columns: Columns = {"contender": str, "all_gathers": str, "gathered_bytes": mib, "peak_bytes": mib, "median_s": ms}
    table(f"a step of {arguments.microbatches} microbatches, {arguments.gb_per_s:g} GB/s", rows, columns)
    settings = {key: value for key, value in vars(arguments).items() if key != "out"}
    return finish(arguments, settings, rows)


def run(task: Task, arguments: argparse.Namespace, setup: Setup) -> list[dict[str, Any]]:
    """Counts what each contender gathers in a step, measures its peak, and times it."""
    names = arguments.contenders
    wanted = [one for one in CONTENDERS if names is None or one.name in names]
    bytes_per_s = arguments.gb_per_s * 1e9
    with emulated_world(arguments.ranks, Network(Link(bytes_per_s, arguments.latency_us * 1e-6))) as world:
        informed = timed(task, told(setup, bytes_per_s, arguments.latency_us), arguments.ranks)
        ready, failed = prepare(wanted, task, informed)
        rows: dict[str, dict[str, Any]] = {name: {"contender": name, **one.to_dict()} for name, one in failed.items()}
        for name, prepared in ready.items():
            world.reset()
            peak_bytes = measured_peak_bytes(prepared.model, task.inputs, prepared.step, setup.device)
            calls, sent = world.traffic.calls, world.traffic.sent
            rows[name] = {
                "contender": name,
                "all_gathers": calls.get(Kind.ALL_GATHER, 0),
                "gathered_bytes": sent.get(Kind.ALL_GATHER, 0.0),
                "peak_bytes": peak_bytes,
            }
        steps = alternate({name: prepared.step for name, prepared in ready.items()}, rounds=arguments.rounds)
    for name, samples in steps.items():
        rows[name] |= samples.to_dict()
    return [rows[one.name] for one in wanted]


def _parser() -> argparse.ArgumentParser:
    made = parser("accumulation", "All-gathers, memory and time of steps that reduce several microbatches once.")
    add_network_arguments(made, CONTENDERS)
    made.add_argument("--microbatches", type=int, default=4, metavar="N", help="of a step (default: 4)")
    made.add_argument("--gb-per-s", type=float, default=0.28, metavar="X", help="link of each rank (default: 0.28)")
    made.add_argument("--threads", type=int, default=1, metavar="N", help="that compute on a CPU (default: 1)")
    return made


if __name__ == "__main__":
    sys.exit(main())
