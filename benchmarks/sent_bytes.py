"""Bytes that a rank sends in one step, beside the least that one sends which holds as much (`bound.py`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any

from torch import nn

import fsdp_compile
from benchmarks import bound, contenders, models
from benchmarks.command import Columns, finish, parser, percent, quiet, table
from benchmarks.contenders import Setup
from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.traffic import full_sharding_bytes
from benchmarks.network.wire import Link
from benchmarks.step_time import add_network_arguments, held_of
from benchmarks.steps import prepare
from fsdp_compile.cost.copies import Way


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("sent_bytes", "Bytes that each rank sends in one step, by kind, beside the least.")
    add_network_arguments(made)
    arguments = made.parse_args(argv)
    quiet()
    task = models.llama(models.SMOKE if arguments.smoke else models.TWO_CORES)
    sizes = bound.sizes_of(task)
    by_name = {one.name: one for one in contenders.ALL}
    rows: list[dict[str, Any]] = []
    with emulated_world(arguments.ranks, Network(Link(bytes_per_s=1e15))) as world:
        setup = Setup(task.block, options=arguments.fsdp_options)
        ready, failed = prepare(contenders.chosen(arguments.contenders), task, setup)
        for name, prepared in ready.items():
            world.reset()
            prepared.step()
            row: dict[str, Any] = {"contender": name, **world.traffic.to_dict()}
            held = held_of(by_name[name], setup)
            if held is not None:
                row["least_bytes"] = bound.least_bytes(held, sizes, arguments.ranks, bound.exchanged_bytes(row)).total
                row["least_share"] = least_share(row["least_bytes"], world.traffic.total_bytes)
            ours = name.startswith("fsdp_compile")  # FSDP2's models have units as well, and no graphs
            row["padding"] = padding(prepared.model, arguments.ranks) if ours else None
            row["copied_bytes"] = copied_bytes(prepared.model) if ours else None
            rows.append(row)
        rows += [{"contender": name, **samples.to_dict()} for name, samples in failed.items()]
    columns: Columns = {
        "contender": str,
        "total_sent_bytes": _mb,
        "least_bytes": _mb,
        "least_share": percent,
        "padding": percent,
    }
    full_bytes = full_sharding_bytes(sizes.all_bytes, arguments.ranks)
    table(f"gathered twice, reduced once: {_mb(full_bytes)}", rows, columns)
    settings = {"ranks": arguments.ranks, "sizes": sizes.to_dict(), "full_sharding_bytes": full_bytes}
    return finish(arguments, settings, rows)


def least_share(least_bytes: float, sent_bytes: float) -> float:
    """The least over what was sent: at most 1."""
    return least_bytes / sent_bytes if sent_bytes else 1.0


def padding(model: nn.Module, ranks: int) -> float:
    """Padding over parameters in the parameter groups of `fsdp_compile`."""
    groups = [group for unit in fsdp_compile.units(model) for group in unit.groups]
    full = sum(prod(p.spec.shape) * group.flat.element_size() for group in groups for p in group.params)
    return sum(group.flat.nbytes for group in groups) * ranks / full - 1


def copied_bytes(model: nn.Module) -> dict[str, int]:
    """What the graphs that ran copy around collectives in a step, by way."""
    graphs = fsdp_compile.explain(model).graphs
    return {way.value: sum(graph.copied_bytes[way] for graph in graphs) for way in Way}


def _mb(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.2f} MB"


if __name__ == "__main__":
    sys.exit(main())
