"""Step time on an emulated network, beside what it takes at least.

Compute is plain `torch.compile` of the unsharded model, measured in the same rounds. `share_of_busy` is the larger of
compute and the time of the bytes that the run sent over its step, `share_of_bound` what no schedule can beat that holds
as much (`bound.py`). The bandwidth is set so that `3 P (N-1)/N`, what gathering everything twice and reducing it once
sends, takes half of compute, as long, and double. A step is forward and backward. Our planner is told of the link, and
of the times of operators that were measured on this CPU.

On a CPU one thread computes, so that another core can play the network: writing what a collective receives takes
processor time that a network card would not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks import bound, contenders, models
from benchmarks.bound import Held, Sizes
from benchmarks.command import finish, ms, parser, percent, quiet, table
from benchmarks.contenders import UNSHARDED, Contender, Setup
from benchmarks.hardware import timed, told
from benchmarks.measure import Run, alternate
from benchmarks.models import Task
from benchmarks.network.emulated import Network, World, emulated_world
from benchmarks.network.traffic import full_sharding_bytes
from benchmarks.network.wire import Link
from benchmarks.steps import Prepared, forget_compiles, prepare

_HEAD = "head"
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
    head = _head(task, setup)  # before anything else takes memory: it makes a whole model for a moment
    sizes = bound.sizes_of(task, _narrowing(task, setup))
    sent = full_sharding_bytes(sizes.all_bytes, arguments.ranks)
    with emulated_world(arguments.ranks, Network(_UNLIMITED), device=setup.device) as world:
        ready, failed = prepare([UNSHARDED], task, setup)
        alone = alternate({UNSHARDED.name: ready[UNSHARDED.name].step}, rounds=arguments.rounds)
        bytes_per_s = sent / (ratio * alone[UNSHARDED.name].median_s)
        others = [one for one in contenders.chosen(arguments.contenders) if one is not UNSHARDED]
        informed = timed(task, told(setup, bytes_per_s, arguments.latency_us), arguments.ranks)
        prepared, errors = prepare(others, task, informed, limit_s=getattr(arguments, "prepare_s", math.inf))
        ready, failed = {**ready, **prepared}, {**failed, **errors}
        world.change(Link(bytes_per_s, arguments.latency_us * 1e-6))
        traffic = {name: _sent(world, prepared) for name, prepared in ready.items()}
        runs: dict[str, Run] = {name: prepared.step for name, prepared in ready.items()}
        steps = alternate({**runs, _HEAD: head}, rounds=arguments.rounds)
    network = Emulated(sizes, arguments.ranks, bytes_per_s)
    computed = Computed(steps[UNSHARDED.name].seconds, steps.pop(_HEAD).seconds)
    by_name = {one.name: one for one in contenders.ON_GPUS}
    ran = [
        {
            "contender": name,
            **samples.to_dict(),
            **traffic[name],
            **shares(held_of(by_name[name], setup), network, computed, samples.seconds, traffic[name]),
        }
        for name, samples in steps.items()
    ]
    return {
        "communication_over_compute": ratio,
        "sizes": sizes.to_dict(),
        "bytes_per_s": bytes_per_s,
        "compute_s": statistics.median(computed.step_s),
        "head_s": statistics.median(computed.head_s),
        "communication_s": sent / bytes_per_s,
        "contenders": [*ran, *({"contender": name, **samples.to_dict()} for name, samples in failed.items())],
    }


@dataclasses.dataclass(frozen=True)
class Emulated:
    """What is sent on the network, between how many ranks, and how fast."""

    sizes: Sizes
    ranks: int
    bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Computed:
    """Seconds of computing in each round: of a step, and of the layer that forward ends with."""

    step_s: Sequence[float]
    head_s: Sequence[float]


def held_of(contender: Contender, setup: Setup) -> Held | None:
    """What a contender holds; `None` where options of our backend say otherwise than `Contender.held`."""
    ours = contender.held in (Held.TWO, Held.TWO_NO_INPUT)
    return None if ours and not bound.is_known(setup.options) else contender.held


def shares(
    held: Held | None,
    network: Emulated,
    computed: Computed,
    seconds: Sequence[float],
    traffic: Mapping[str, Any],
) -> dict[str, float]:
    """How near a contender came to both numbers of `bound.py`, round by round.

    The machine may have another speed in the next round. A contender that failed has none, one of unknown memory no
    bound.
    """
    if not seconds or len(seconds) != len(computed.step_s):
        return {}

    def median(times: Iterable[float]) -> float:
        return statistics.median(least / own for least, own in zip(times, seconds, strict=True))

    rate, sent = network.bytes_per_s, float(traffic["total_sent_bytes"])
    busy_s = [bound.busy_s(compute, sent, rate) for compute in computed.step_s]
    found = {"busy_s": statistics.median(busy_s), "share_of_busy": median(busy_s)}
    if held is not None:
        least = bound.least_bytes(held, network.sizes, network.ranks, bound.exchanged_bytes(traffic))
        of_rounds = zip(computed.step_s, computed.head_s, strict=True)
        bound_s = [bound.bound_s(step_s, head_s, least, rate) for step_s, head_s in of_rounds]
        found |= {"least_bytes": least.total, "bound_s": statistics.median(bound_s), "share_of_bound": median(bound_s)}
    return found


def _head(task: Task, setup: Setup) -> Run:
    """Runs the last layer of a Llama's forward alone, in the dtype that the contenders compute it in."""
    model: Any = task.make().to(setup.param_dtype)
    head: nn.Linear = model.get_output_embeddings()
    tokens = task.inputs[1]["input_ids"]
    hidden = head.weight.new_zeros(*tokens.shape, head.in_features)

    def run() -> None:
        with torch.no_grad():
            head(hidden)

    return run


def _narrowing(task: Task, setup: Setup) -> int:
    stored = next(task.make().parameters()).element_size()
    return 1 if setup.param_dtype is None else stored // setup.param_dtype.itemsize


def _sent(world: World, prepared: Prepared) -> dict[str, Any]:
    """Traffic of one step."""
    world.reset()
    prepared.step()
    return world.traffic.to_dict()


def _print(section: dict[str, Any]) -> None:
    ratio, compute = section["communication_over_compute"], ms(section["compute_s"])
    table(
        f"communication = {ratio:g} x compute, {compute}",
        section["contenders"],
        {
            "contender": str,
            "median_s": ms,
            "share_of_busy": percent,
            "share_of_bound": percent,
            "total_sent_bytes": lambda n: f"{n / 1e6:.1f} MB",
        },
    )


def _parser() -> argparse.ArgumentParser:
    made = parser("step_time", "Step time of all contenders beside what a step takes at least.")
    add_network_arguments(made)
    made.add_argument(
        "--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="communication over compute (default: 0.5 1 2)"
    )
    made.add_argument("--threads", type=int, default=1, metavar="N", help="that compute on a CPU (default: 1)")
    return made


def add_network_arguments(made: argparse.ArgumentParser, among: Sequence[Contender] = contenders.ALL) -> None:
    """Arguments of every benchmark that runs contenders on the emulated network."""
    names = [contender.name for contender in among]
    made.add_argument("--ranks", type=int, default=8, metavar="N", help="emulated ranks (default: 8)")
    made.add_argument("--rounds", type=int, default=10, metavar="N", help="steps of each contender (default: 10)")
    made.add_argument("--latency-us", type=float, default=50.0, metavar="US", help="per collective (default: 50)")
    made.add_argument("--contenders", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    made.add_argument(
        "--fsdp-options", type=json.loads, default={}, metavar="JSON", help='of backend "fsdp", such as {"prefetch": 2}'
    )


if __name__ == "__main__":
    sys.exit(main())
