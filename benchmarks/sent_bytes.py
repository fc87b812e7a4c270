"""Bytes that a rank sends in one step, beside the floor of full sharding, `3 P (N-1)/N`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

import fsdp_compile
from benchmarks import contenders, models
from benchmarks.command import Columns, finish, parser, percent, quiet, table
from benchmarks.contenders import Setup
from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.traffic import full_sharding_bytes
from benchmarks.network.wire import Link
from benchmarks.step_time import add_network_arguments
from benchmarks.steps import prepare
from fsdp_compile.cost.copies import Way


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("sent_bytes", "Bytes that each rank sends in one step, by kind, beside 3 P (N-1)/N.")
    add_network_arguments(made)
    arguments = made.parse_args(argv)
    quiet()
    task = models.llama(models.SMOKE if arguments.smoke else models.TWO_CORES)
    size_bytes = models.parameter_bytes(task.make())
    floor_bytes = full_sharding_bytes(size_bytes, arguments.ranks)
    rows: list[dict[str, Any]] = []
    with emulated_world(arguments.ranks, Network(Link(bytes_per_s=1e15))) as world:
        setup = Setup(task.block, options=arguments.fsdp_options)
        ready, failed = prepare(contenders.chosen(arguments.contenders), task, setup)
        for name, prepared in ready.items():
            world.reset()
            prepared.step()
            row = {"contender": name, **world.traffic.to_dict()}
            row["share_of_floor"] = world.traffic.total_bytes / floor_bytes
            row["padding"] = padding(prepared.model, arguments.ranks)
            row["copied_bytes"] = copied_bytes(prepared.model)
            rows.append(row)
        rows += [{"contender": name, **samples.to_dict()} for name, samples in failed.items()]
    columns: Columns = {"contender": str, "total_sent_bytes": _mb, "share_of_floor": percent, "padding": percent}
    table(f"floor: {_mb(floor_bytes)}", rows, columns)
    settings = {"ranks": arguments.ranks, "parameter_bytes": size_bytes, "floor_bytes": floor_bytes}
    return finish(arguments, settings, rows)


def padding(model: nn.Module, ranks: int) -> float | None:
    """Padding over parameters in the parameter groups of `fsdp_compile`; `None` for a model that it did not shard."""
    units = fsdp_compile.units(model)
    full = sum(unit.full_bytes for unit in units)
    return sum(unit.shard_bytes for unit in units) * ranks / full - 1 if units else None


def copied_bytes(model: nn.Module) -> dict[str, int] | None:
    """What the graphs that ran copy around collectives in a step, by way; `None` for a model that is not ours."""
    if not fsdp_compile.units(model):
        return None
    graphs = fsdp_compile.explain(model).graphs
    return {way.value: sum(graph.copied_bytes[way] for graph in graphs) for way in Way}


def _mb(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.2f} MB"


if __name__ == "__main__":
    sys.exit(main())
