"""What `plan` chooses, beside every other configuration that it could have chosen, all run in the emulated network.

Cases are drawn: ranks, the ratio of communication to compute, and a limit of memory between what the least and the
greatest configuration need. Graphs run operator by operator, whose times are measured first, as for `cost_model`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.command import Columns, finish, mib, ms, parser, percent, quiet, table
from benchmarks.hardware import named
from benchmarks.measure import Samples, recorded, time_once
from benchmarks.models import parameter_bytes
from benchmarks.network.emulated import Network, World, emulated_world
from benchmarks.network.traffic import full_sharding_bytes
from benchmarks.network.wire import Link
from benchmarks.peak import measured_peak_bytes, storage_bytes
from fsdp_compile.cost.hardware import DEVICES, Hardware
from fsdp_compile.explain import explain, measured
from fsdp_compile.explain.stand_in import planning_world
from fsdp_compile.search.api import plan
from fsdp_compile.search.choice import Configuration
from fsdp_compile.search.fit import Fit
from fsdp_compile.search.search import Search
from fsdp_compile.training.model import Llama, ModelShape

OPTIONS = {"lower": "eager"}
RATIOS = (0.1, 0.3, 1.0, 2.0)
WORLDS = (4, 8, 16)
ROOM = 1e9


@dataclasses.dataclass(frozen=True)
class Case:
    """What is drawn.

    Attributes:
        ranks: Of the world, in hosts of 4.
        samples: Of a rank in a step.
        shape: Of the model.
        ratio: Time of all collectives over that of compute.
        room: Where the limit lies between the least and the greatest need, from 0 to 1.
    """

    ranks: int
    samples: int
    shape: ModelShape
    ratio: float
    room: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("fit", "The configuration that plan() chooses, beside all others, measured.")
    made.add_argument("--cases", type=int, default=20, metavar="N", help="that are drawn (default: 20)")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of the cases (default: 0)")
    made.add_argument("--rounds", type=int, default=5, metavar="N", help="steps of each (default: 5)")
    arguments = made.parse_args(argv)
    quiet()
    torch.set_num_threads(1)
    rows = list(_rows(arguments))
    columns: Columns = {
        "case": str,
        "configuration": str,
        "chosen": lambda is_it: "chosen" if is_it else "",
        "median_s": ms,
        "time_error": percent,
        "peak_bytes": mib,
        "memory_error": percent,
        "limit_bytes": mib,
    }
    table("all configurations of each case", rows, columns)
    return finish(arguments, {"cases": arguments.cases, "seed": arguments.seed, "rounds": arguments.rounds}, rows)


def _rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    dice = random.Random(arguments.seed)
    for number in range(1 if arguments.smoke else arguments.cases):
        width, layers = (32, 2) if arguments.smoke else (dice.choice((128, 256)), dice.choice((2, 4)))
        case = Case(
            2 if arguments.smoke else dice.choice(WORLDS),
            1 if arguments.smoke else dice.choice((1, 2)),
            ModelShape(width=width, layers=layers, heads=4, seq_len=16 if arguments.smoke else 128),
            dice.choice(RATIOS),
            dice.random(),
        )
        rows = list(_case(case, 1 if arguments.smoke else arguments.rounds))
        fits = [row["median_s"] for row in rows if row.get("fits") and "median_s" in row]
        for row in rows:
            over = row["median_s"] / min(fits) - 1 if fits and "median_s" in row else None
            yield {"case": number, **dataclasses.asdict(case), **row, "over_fastest": over}


def _case(case: Case, rounds: int) -> Iterator[dict[str, Any]]:
    """Runs every configuration of a case."""
    model, tokens = Llama(case.shape), torch.zeros(1, case.shape.seq_len, dtype=torch.long)
    there = _measured(model, case)
    fit = _searched(model, tokens, case, there, ROOM)
    every = _every(fit)
    needs = [made.peak_bytes for made in every]
    limit = min(needs) + case.room * (max(needs) - min(needs))
    best = _searched(model, tokens, case, there, limit / 1e9)
    chosen = best.best[0].choice if best.fits else None
    link = Link(there.link.bytes_per_s, there.link.launch.value * 1e-6)
    with emulated_world(case.ranks, Network(link)) as world:
        for made in every:
            row = _run(made, best, case, world, rounds)
            yield {
                **row,
                "chosen": made.choice == chosen,
                "limit_bytes": limit,
                "fits": row.get("peak_bytes", limit) <= limit,
            }


def _searched(model: nn.Module, tokens: torch.Tensor, case: Case, there: Hardware, memory_gb: float) -> Fit:
    total = case.ranks * case.samples * tokens.numel()
    asked: dict[str, Any] = {"gpus": case.ranks, "tokens_per_step": total, "hardware": there, "memory_gb": memory_gb}
    return plan(model, tokens, options=OPTIONS, **asked)


def _every(fit: Fit) -> list[Configuration]:
    """The estimates of all configurations, without a limit: nothing is computed again."""
    search = Search(fit.program, fit.ask)
    with planning_world(fit.ask.gpus):
        return [search.configuration(choice) for choice in fit.ask.choices() if choice.form == "whole"]


def _measured(model: nn.Module, case: Case) -> Hardware:
    """Times of this machine's operators for every micro-batch, and a link so fast that the drawn ratio holds."""
    there = Hardware(DEVICES["cpu"], named("emulated", 1e15, 0.0), 4)
    compute_us = 0.0
    for micro_batch in range(1, case.samples + 1):
        if case.samples % micro_batch == 0:
            tokens = torch.zeros(micro_batch, case.shape.seq_len, dtype=torch.long)
            planned = explain(model, tokens, world_size=case.ranks, options=OPTIONS, hardware=there)
            there = measured(planned)
            again = explain(model, tokens, world_size=case.ranks, options=OPTIONS, hardware=there)
            compute_us = again.compute_us * case.samples / micro_batch
    sent = full_sharding_bytes(parameter_bytes(model), case.ranks)
    link = named("emulated", sent / (case.ratio * compute_us * 1e-6), 100.0)
    return dataclasses.replace(there, link=link)


def _run(made: Configuration, fit: Fit, case: Case, world: World, rounds: int) -> dict[str, Any]:
    """Trains with a configuration, by the very code that is to be written for it."""
    torch.compiler.reset()
    torch.manual_seed(0)
    only = dataclasses.replace(fit, found=dataclasses.replace(fit.found, best=(made,)))
    scope: dict[str, Any] = {"model": Llama(case.shape), "hardware": fit.ask.hardware}
    tokens = torch.zeros(made.choice.micro_batch, case.shape.seq_len, dtype=torch.long)
    samples = Samples()
    row: dict[str, Any] = {"configuration": _name(made)}

    def step() -> None:
        for _ in range(made.choice.accumulation):
            outputs = scope["compiled"](tokens)
            outputs.square().mean().backward()
        scope["optimizer"].step()
        scope["optimizer"].zero_grad()

    with recorded(samples):
        exec(only.code, scope)
        step()  # compiles, and makes the optimizer's state
        step()
        gc.collect()
        samples.seconds += [time_once(step) for _ in range(rounds)]
        state = [t for held in scope["optimizer"].state.values() for t in held.values() if isinstance(t, torch.Tensor)]
        peak = measured_peak_bytes(scope["model"], tokens, step, "cpu") + storage_bytes(state)
        row |= {"peak_bytes": peak, "memory_error": made.peak_bytes / peak - 1}
        row |= {"time_error": made.step_us * 1e-6 / samples.median_s - 1}
    world.reset()
    return {**row, **samples.to_dict(), "predicted_s": made.step_us * 1e-6, "predicted_bytes": made.peak_bytes}


def _name(made: Configuration) -> str:
    choice = made.choice
    counts = f"{choice.micro_batch} x {choice.accumulation}"
    return f"{choice.shards} x {choice.replicas}, {choice.reshard.value}, {counts}"


if __name__ == "__main__":
    sys.exit(main())
