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
from benchmarks.hardware import measured, named
from benchmarks.measure import Samples, time_once
from benchmarks.models import parameter_bytes
from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.traffic import full_sharding_bytes
from benchmarks.network.wire import Link
from benchmarks.peak import measured_peak_bytes, storage_bytes
from fsdp_compile.cost.hardware import DEVICES, Hardware
from fsdp_compile.explain import explain
from fsdp_compile.explain.stand_in import planning_world
from fsdp_compile.options import FSDPOptions
from fsdp_compile.search.api import Fit
from fsdp_compile.search.choice import Ask, Configuration, Part
from fsdp_compile.search.search import Program, Search
from fsdp_compile.training.model import Llama, ModelShape

OPTIONS = {"lower": "eager"}
RATIOS = (0.1, 0.3, 1.0, 2.0)
WORLDS = (4, 8, 16)
TURNS = 4
RESERVED = 0.01
"""Share of the memory that is left free, as it is on a GPU: estimates of peaks are off by up to half a percent."""


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
        "over_fastest": lambda share: "" if share is None else percent(share),
    }
    table("all configurations of each case", rows, columns)
    return finish(arguments, {"cases": arguments.cases, "seed": arguments.seed, "rounds": arguments.rounds}, rows)


def _rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    dice = random.Random(arguments.seed)
    for number in range(1 if arguments.smoke else arguments.cases):
        width, layers = (32, 2) if arguments.smoke else (dice.choice((256, 384)), dice.choice((2, 4)))
        case = Case(
            2 if arguments.smoke else dice.choice(WORLDS),
            1 if arguments.smoke else dice.choice((1, 2)),
            ModelShape(width=width, layers=layers, heads=4, seq_len=16 if arguments.smoke else 128),
            dice.choice(RATIOS),
            dice.random(),
        )
        for row in _case(case, 1 if arguments.smoke else arguments.rounds):
            yield {"case": number, **dataclasses.asdict(case), **row}


def _case(case: Case, rounds: int) -> list[dict[str, Any]]:
    """Runs every configuration of a case; the chosen one and the fastest are timed once more, in turn."""
    model, tokens = Llama(case.shape), torch.zeros(1, case.shape.seq_len, dtype=torch.long)
    there = _measured(model, case)
    program = Program(model, (tokens,), {}, FSDPOptions.from_dict(OPTIONS))
    total = case.ranks * case.samples * tokens.numel()
    ask = Ask(case.ranks, there, float("inf"), 0.0, total, tokens.numel(), "adamw", ())
    free = Search(program, ask)
    of_free = _every(free)
    needs = [made.peak_bytes for made in of_free]
    limit = min(needs) + case.room * (max(needs) - min(needs))
    limited = free.elsewhere(dataclasses.replace(ask, memory_bytes=limit, reserve_bytes=RESERVED * limit))
    fit = Fit("Llama", limited.ask, limited.run(), (), program)
    # What does not keep the limit by its estimate runs without one: its peak shows whether that is so.
    every = [one if one.peak_bytes <= limit else other for one, other in zip(_every(limited), of_free, strict=True)]
    chosen = next((made for made in every if fit.fits and made.choice == fit.best[0].choice), None)
    link = Link(there.link.bytes_per_s, there.link.launch.value * 1e-6)
    rows = []
    with emulated_world(case.ranks, Network(link)) as world:
        for made in every:
            run = _Run(made, fit, case)
            rows.append({**run.measured(rounds), "chosen": made is chosen, "limit_bytes": limit})
            world.reset()
        kept = [number for number, row in enumerate(rows) if row["peak_bytes"] <= limit]
        if chosen is not None and kept:
            best, ours = min(kept, key=lambda number: rows[number]["median_s"]), every.index(chosen)
            over = _over(every[ours], every[best], fit, case, TURNS * rounds) if best != ours else 0.0
            rows[ours]["over_fastest"] = over
    return rows


def _over(ours: Configuration, best: Configuration, fit: Fit, case: Case, rounds: int) -> float:
    """By which share a step of one configuration takes longer than that of another, timed in turn."""
    runs = [_Run(made, fit, case) for made in (ours, best)]
    samples = [Samples(), Samples()]
    for _ in range(rounds):
        for run, taken in zip(runs, samples, strict=True):
            taken.seconds.append(time_once(run.step))
    return samples[0].median_s / samples[1].median_s - 1


def _every(search: Search) -> list[Configuration]:
    """The estimates of all configurations, with as few blocks computed again as the limit asks for."""
    with planning_world(search.ask.gpus):
        return list(map(search.configuration, search.ask.choices()))


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


class _Run:
    """Training with a configuration, by the very code that is to be written for it."""

    def __init__(self, made: Configuration, fit: Fit, case: Case) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self._made = made
        self._tokens = torch.zeros(made.choice.micro_batch, case.shape.seq_len, dtype=torch.long)
        self._scope: dict[str, Any] = {"model": Llama(case.shape), "hardware": fit.ask.hardware}
        exec(dataclasses.replace(fit, found=dataclasses.replace(fit.found, best=(made,))).code, self._scope)
        for _ in range(2):  # compiles, and makes the optimizer's state
            self.step()

    def step(self) -> None:
        """All micro-batches, and the optimizer."""
        for _ in range(self._made.choice.accumulation):
            self._scope["compiled"](self._tokens).square().mean().backward()
        self._scope["optimizer"].step()
        self._scope["optimizer"].zero_grad()

    def measured(self, rounds: int) -> dict[str, Any]:
        """Time and peak of a step, beside their estimates."""
        made, samples = self._made, Samples()
        gc.collect()
        samples.seconds += [time_once(self.step) for _ in range(rounds)]
        states = self._scope["optimizer"].state.values()
        state = [tensor for held in states for tensor in held.values() if isinstance(tensor, torch.Tensor)]
        peak = measured_peak_bytes(self._scope["model"], self._tokens, self.step, "cpu") + storage_bytes(state)
        predicted = made.peak_bytes - made.memory[Part.RESERVE]
        return {
            "configuration": _name(made),
            **samples.to_dict(),
            "predicted_s": made.step_us * 1e-6,
            "time_error": made.step_us * 1e-6 / samples.median_s - 1,
            "peak_bytes": peak,
            "predicted_bytes": predicted,
            "memory_error": predicted / peak - 1,
        }


def _name(made: Configuration) -> str:
    choice = made.choice
    counts = f"{choice.micro_batch} x {choice.accumulation}"
    again = f", {made.recomputed} blocks again" if made.recomputed else ""
    return f"{choice.shards} x {choice.replicas}, {choice.reshard_after_forward}, {counts}, {choice.form}{again}"


if __name__ == "__main__":
    sys.exit(main())
