"""What our planner is told of the machine: the link's rate and latency, and times of operators."""

from __future__ import annotations

import dataclasses

import fsdp_compile
from benchmarks.contenders import Setup
from benchmarks.models import Task
from fsdp_compile.cost.hardware import DEVICES, Hardware, Link, Port, Quantity, make_link
from fsdp_compile.explain import Plan, measured


def told(setup: Setup, bytes_per_s: float, latency_us: float) -> Setup:
    """The same with the emulated link named to the planner, as users name theirs, and what is kept left to it."""
    if setup.options.get("prefetch", "auto") != "auto":
        return setup
    link = named("emulated", bytes_per_s, latency_us)
    device = DEVICES["h200-sxm" if setup.device == "cuda" else "cpu"]
    options = {"hardware": Hardware(device, link), **setup.options}
    return dataclasses.replace(setup, options=options, reshard_after_forward="auto")


def named(name: str, bytes_per_s: float, latency_us: float, port: Port = Port.GROUP) -> Link:
    """An emulated link, as our planner takes it."""
    return dataclasses.replace(
        make_link(name, bytes_per_s / 1e9, "the benchmark's", port),
        rate_share=Quantity(1.0, "share of rate", "the benchmark's"),
        launch=Quantity(latency_us, "us", "the benchmark's"),
        hop=Quantity(0.0, "us", "the benchmark's"),
    )


def timed(task: Task, setup: Setup, ranks: int) -> Setup:
    """The same with operators measured on this machine, where the planner was told of a CPU.

    CPUs differ by far more than what data sheets say of a GPU.
    """
    if "hardware" not in setup.options or setup.device != "cpu":
        return setup
    known = measured(plan_of(task, setup, ranks))
    return dataclasses.replace(setup, options={**setup.options, "hardware": known})


def plan_of(task: Task, setup: Setup, ranks: int) -> Plan:
    """What `explain` says of a task, trained as `contenders.ours` does."""
    positional, keywords = task.inputs
    kept = setup.reshard_after_forward
    options = {**setup.options, "mp_policy": setup.policy, "reshard_after_forward": kept}
    return fsdp_compile.explain(task.make(), *positional, world_size=ranks, options=options, **keywords)
