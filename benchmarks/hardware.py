"""What our planner is told of the machine: the link's rate and latency, and times of operators."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import fx
from torch.utils._pytree import tree_map

import fsdp_compile
from benchmarks.contenders import Setup
from benchmarks.models import Task
from fsdp_compile.calibrate import median_us
from fsdp_compile.cost.communicate import is_own
from fsdp_compile.cost.compute import value_of
from fsdp_compile.cost.fusion import Fusion, is_fusible, launches_nothing
from fsdp_compile.cost.hardware import DEVICES, Hardware, Link, Port, Quantity, make_link
from fsdp_compile.cost.sizes import concrete, tensor_bytes
from fsdp_compile.explain import Plan
from fsdp_compile.ir.graph import record_of

_CPU: Final = torch.device("cpu")


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


def measured(plan: Plan, rounds: int = 5) -> Hardware:
    """The hardware of a plan, with measured times for its matmuls, attentions and all that is a kernel by itself.

    Each distinct operator runs a few times on made-up values on this CPU. What a compiler fuses keeps its roofline, and
    so does an operator that refuses made-up values, or does not exist here.
    """
    assert plan.traced is not None
    times: dict[str, float] = {}
    fusion = plan.traced.fusion
    for node in (node for steps in plan.steps for step in steps for node in step.graph.nodes):
        if runs_alone(node, fusion) and signature_of(node) not in times:
            with contextlib.suppress(RuntimeError, IndexError, ValueError, TypeError):
                times[signature_of(node)] = median_us(_runnable(node), _CPU, rounds)
    device = dataclasses.replace(plan.hardware.device, estimate=MeasuredTimes(times, fusion))
    return dataclasses.replace(plan.hardware, device=device)


@dataclasses.dataclass(frozen=True)
class MeasuredTimes:
    """Measured times in us by `signature_of`, as `Device.estimate`; other ranks get them by pickle."""

    times: Mapping[str, float]
    fusion: Fusion

    def __call__(self, node: fx.Node) -> float | None:
        return self.times.get(signature_of(node)) if runs_alone(node, self.fusion) else None


def signature_of(node: fx.Node) -> str:
    """A text that is equal for nodes that do the same to values of the same types, in any model and on any rank."""

    def spell(argument: Any) -> str:
        value = value_of(argument)
        if not isinstance(value, torch.Tensor):
            return str(value)
        shape, strides = ([concrete(n) for n in of] for of in (value.shape, value.stride()))
        return f"{str(value.dtype).removeprefix('torch.')}{shape}{strides}"

    return f"{node.target}{tree_map(spell, (node.args, dict(sorted(node.kwargs.items()))))}"


def runs_alone(node: fx.Node, fusion: Fusion) -> bool:
    """Whether a node of the model's own is a kernel by itself, so that its time can be measured separately."""
    if node.op != "call_function" or record_of(node) is not None or launches_nothing(node) or is_own(node):
        return False
    return fusion is Fusion.NONE or not is_fusible(node)


def _runnable(node: fx.Node) -> Callable[[], object]:
    def made_up(argument: Any) -> Any:
        value = value_of(argument)
        if isinstance(value, torch.device):
            return _CPU
        if not isinstance(value, torch.Tensor):
            return value
        shape, strides = ([concrete(n) for n in of] for of in (value.shape, value.stride()))
        # Strided values may overlap or have gaps: the memory that they reach, not their elements.
        memory = torch.empty(tensor_bytes(value) // value.element_size(), dtype=value.dtype)
        return (memory.normal_() if value.is_floating_point() else memory.zero_()).as_strided(shape, strides)

    args, kwargs = tree_map(made_up, (node.args, dict(node.kwargs)))
    target: Any = node.target
    return lambda: target(*args, **kwargs)
