"""Measured times of the operators in a plan: taken once, stored in a file, the same on every rank.

If each rank planned by times of its own, schedules would differ between ranks. So the first rank alone measures, or
reads the file, and all get its numbers, as plain data that does not change while graphs are compiled.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from filelock import FileLock
from torch import fx
from torch.utils._pytree import tree_map

from fsdp_compile.cost.compute import is_measurable, runs_alone, signature_of, value_of
from fsdp_compile.cost.fusion import plan_kernels
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.sizes import concrete, tensor_bytes
from fsdp_compile.errors import ConfigError, RankFailedError
from fsdp_compile.explain.plan import Plan

Times = Mapping[str, float]
"""Times in us by `signature_of`."""


def measured(
    plan: Plan, *, cache: str | Path | None = None, device: str | torch.device = "cpu", rounds: int = 5
) -> Hardware:
    """The hardware of a plan, with measured times for its matmuls, attentions and all that is a kernel by itself.

    Each distinct operator runs a few times on made-up values. What a compiler fuses keeps its roofline. With a process
    group, every rank must call this: the first one measures, and all get its times.

    Args:
        plan: By `explain` for a plain model; one for the shapes, dtypes and options of the job.
        cache: A JSON file of times by device and torch version; times in it are not measured again.
        device: Where to measure.
        rounds: Runs of each operator, of which the median counts.

    Raises:
        ConfigError: If the plan is of a model that has run, or the cache is damaged.
    """
    nodes: dict[str, fx.Node] = {}  # one for each operator that can be measured by itself
    fusion = plan.origin("measured(plan)").fusion
    for step in (step for steps in plan.steps for step in steps):
        kernels = plan_kernels(step.graph, fusion)
        for node in step.graph.nodes:
            if runs_alone(node, kernels) and is_measurable(node):
                nodes.setdefault(signature_of(node), node)

    def times() -> Times:
        if cache is None:
            return _measured(nodes, torch.device(device), rounds)
        return _cached(nodes, Path(cache), torch.device(device), rounds)

    known = _of_the_first_rank(times)
    return dataclasses.replace(plan.hardware, device=dataclasses.replace(plan.hardware.device, measured=known))


WARM_UP: Final = 1
"""Runs that are not counted: the first one may pick a kernel or allocate memory."""


def median_us(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Time in us of a run, all that it starts on the device included: the median out of so many."""
    samples = []
    wait: Callable[[torch.device], object] = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    with torch.no_grad():
        for _ in range(WARM_UP + rounds):
            wait(device)
            start_s = time.perf_counter()
            run()
            wait(device)
            samples.append((time.perf_counter() - start_s) * 1e6)
    return statistics.median(samples[WARM_UP:])


def _cached(nodes: Mapping[str, fx.Node], path: Path, device: torch.device, rounds: int) -> Times:
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        every = _read(path) if path.exists() else {}
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
        known = every.setdefault(f"{device.type}, {name}, torch {torch.__version__}", {})
        missing = {signature: node for signature, node in nodes.items() if signature not in known}
        if missing:
            known.update(_measured(missing, device, rounds))
            written = path.with_name(f"{path.name}.new")  # a run that is killed does not damage the old file
            written.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            written.replace(path)
        return {signature: known[signature] for signature in nodes if signature in known}


def _read(path: Path) -> dict[str, dict[str, float]]:
    """The times in a cache, by setting; raises `ConfigError` for a file that is none."""
    try:
        every = json.loads(path.read_text(encoding="utf-8"))
        return {str(of): {str(name): float(us) for name, us in times.items()} for of, times in every.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the file is no cache of measured times, or was cut off: {error}",
            where=f"measured(cache={str(path)!r})",
            instead="delete the file, and the times are measured again; or another path",
        ) from error


def _measured(nodes: Mapping[str, fx.Node], device: torch.device, rounds: int) -> Times:
    found = {}
    for signature, node in nodes.items():
        # An operator that refuses made-up values, or does not exist on the device, keeps its roofline.
        try:
            found[signature] = median_us(_runnable(node, device), device, rounds)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
    return found


def _runnable(node: fx.Node, device: torch.device) -> Callable[[], object]:
    def made_up(argument: Any) -> Any:
        value = value_of(argument)
        if isinstance(value, torch.device):
            return device
        if not isinstance(value, torch.Tensor):
            return value
        shape, strides = ([concrete(n) for n in of] for of in (value.shape, value.stride()))
        # Strided values may overlap or have gaps: the memory that they reach, not their elements.
        reach = tensor_bytes(value) // value.element_size()
        memory = torch.empty(reach, dtype=value.dtype, device=device)
        return (memory.normal_() if value.is_floating_point() else memory.zero_()).as_strided(shape, strides)

    args, kwargs = tree_map(made_up, (node.args, dict(node.kwargs)))
    target: Any = node.target
    return lambda: target(*args, **kwargs)


def _of_the_first_rank(times: Callable[[], Times]) -> Times:
    """The times that the first rank finds, on every rank; or its error, since the others would wait forever."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return times()
    box: list[Times | str] = [""]
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box = [times()]
        except Exception as error:
            failed, box = error, [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], str):
        raise RankFailedError(
            f"the first rank could not measure: {box[0]}",
            where="measured(plan)",
            instead="see that rank's error; a cache that it can write, operators that run on its device",
        ) from failed
    return box[0]
