"""Step time as a share of the floor, on an emulated network.

The floor is the larger of compute (plain `torch.compile` of the unsharded model, measured in the same rounds) and
communication (`3 P (N-1)/N` over the bandwidth). The bandwidth is set so that communication is half of compute, equal
to it, and double. A step is forward and backward. Our planner is told of the link, and of the times of operators that
were measured on this CPU.

On a CPU one thread computes, so that another core can play the network: writing what a collective receives takes
processor time that a network card would not.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import contenders, models
from benchmarks.command import finish, ms, parser, percent, quiet, table
from benchmarks.contenders import UNSHARDED, Setup
from benchmarks.hardware import timed, told
from benchmarks.measure import Samples, alternate
from benchmarks.models import Task
from benchmarks.network.emulated import Network, World, emulated_world
from benchmarks.network.traffic import full_sharding_bytes
from benchmarks.network.wire import Link
from benchmarks.steps import Prepared, forget_compiles, prepare

_UNLIMITED = Link(bytes_per_s=1e15)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = _parser().parse_args(argv)
    quiet()
    torch.set_num_threads(arguments.threads)
    task = models.llama(models.SMOKE if arguments.smoke else models.TWO_CORES)
    if arguments.smoke:
        arguments.rounds, arguments.ratios = 2, arguments.ratios[:1]
    results = []
    for ratio in arguments.ratios:
        section = run(task, ratio, arguments, Setup(task.block, options=arguments.fsdp_options))
        _print(section)
        results.append(section)
    settings = {key: value for key, value in vars(arguments).items() if key != "out"}
    return finish(arguments, settings, results)


def run(task: Task, ratio: float, arguments: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    """Measures all contenders with communication that is `ratio` times compute.

    Args:
        task: What is trained.
        ratio: Time of communication over time of compute.
        arguments: Ranks, rounds, latency, contenders.
        setup: What contenders may know.
    """
    forget_compiles()
    size_bytes = models.parameter_bytes(task.make()) // _narrowing(task, setup)
    sent = full_sharding_bytes(size_bytes, arguments.ranks)
    with emulated_world(arguments.ranks, Network(_UNLIMITED), device=setup.device) as world:
        ready, failed = prepare([UNSHARDED], task, setup)
        alone = alternate({UNSHARDED.name: ready[UNSHARDED.name].step}, rounds=arguments.rounds)
        bytes_per_s = sent / (ratio * alone[UNSHARDED.name].median_s)
        others = [one for one in contenders.chosen(arguments.contenders) if one is not UNSHARDED]
        informed = timed(task, told(setup, bytes_per_s, arguments.latency_us), arguments.ranks)
        prepared, errors = prepare(others, task, informed)
        ready, failed = {**ready, **prepared}, {**failed, **errors}
        world.change(Link(bytes_per_s, arguments.latency_us * 1e-6))
        traffic = {name: _sent(world, prepared) for name, prepared in ready.items()}
        steps = alternate({name: prepared.step for name, prepared in ready.items()}, rounds=arguments.rounds)
    communication_s = sent / bytes_per_s
    floors_s = [max(compute_s, communication_s) for compute_s in steps[UNSHARDED.name].seconds]
    return {
        "communication_over_compute": ratio,
        "parameter_bytes": size_bytes,
        "bytes_per_s": bytes_per_s,
        "compute_s": steps[UNSHARDED.name].median_s,
        "communication_s": communication_s,
        "floor_s": statistics.median(floors_s),
        "contenders": [
            *(_row(name, samples, floors_s, traffic.get(name, {})) for name, samples in steps.items()),
            *(_row(name, samples, floors_s, {}) for name, samples in failed.items()),
        ],
    }


def _narrowing(task: Task, setup: Setup) -> int:
    stored = next(task.make().parameters()).element_size()
    return 1 if setup.param_dtype is None else stored // setup.param_dtype.itemsize


def _sent(world: World, prepared: Prepared) -> dict[str, Any]:
    """Traffic of one step."""
    world.reset()
    prepared.step()
    return world.traffic.to_dict()


def _row(name: str, samples: Samples, floors_s: Sequence[float], traffic: dict[str, Any]) -> dict[str, Any]:
    row = {"contender": name, **samples.to_dict(), **traffic}
    if "median_s" in row:
        # Round by round: the machine may have another speed in the next one.
        row["share_of_floor"] = statistics.median(map(operator.truediv, floors_s, samples.seconds))
    return row


def _print(section: dict[str, Any]) -> None:
    ratio, floor = section["communication_over_compute"], ms(section["floor_s"])
    table(
        f"communication = {ratio:g} x compute; floor {floor} (compute {ms(section['compute_s'])})",
        section["contenders"],
        {
            "contender": str,
            "median_s": ms,
            "share_of_floor": percent,
            "total_sent_bytes": lambda n: f"{n / 1e6:.1f} MB",
        },
    )


def _parser() -> argparse.ArgumentParser:
    made = parser("step_time", "Step time of all contenders as a share of max(compute, communication).")
    add_network_arguments(made)
    made.add_argument(
        "--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="communication over compute (default: 0.5 1 2)"
    )
    made.add_argument("--threads", type=int, default=1, metavar="N", help="that compute on a CPU (default: 1)")
    return made


def add_network_arguments(made: argparse.ArgumentParser) -> None:
    """Arguments of every benchmark that runs contenders on the emulated network."""
    names = [contender.name for contender in contenders.ALL]
    made.add_argument("--ranks", type=int, default=8, metavar="N", help="emulated ranks (default: 8)")
    made.add_argument("--rounds", type=int, default=10, metavar="N", help="steps of each contender (default: 10)")
    made.add_argument("--latency-us", type=float, default=50.0, metavar="US", help="per collective (default: 50)")
    made.add_argument("--contenders", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    made.add_argument(
        "--fsdp-options", type=json.loads, default={}, metavar="JSON", help='of backend "fsdp", such as {"prefetch": 2}'
    )


if __name__ == "__main__":
    sys.exit(main())
