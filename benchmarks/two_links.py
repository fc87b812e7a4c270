"""FSDP beside tensor parallelism on an emulated network with a link inside of hosts and one between them.

Four ranks on two hosts: a Llama is split over the two ranks of a host, and what each has is sharded over the hosts.
Compute is the split model under plain `torch.compile` while both links take no time, without what writing the outputs
of its collectives takes, which it waits for. `share_of_busy` is the largest of compute and of what the bytes sent on
each link take, over the step, round by round: no lane can be done sooner.

The rate between hosts is set as in `step_time`, from the bytes of this rank's part; that inside of a host so that the
collectives of tensor parallelism take a share of compute. Forward has nothing to compute while they are sent, so that
about half of that share is lost to everyone. Our planner is told of both links, and of the times of operators, measured
on a Llama that is as large as one rank's part.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from benchmarks import models
from benchmarks.command import finish, mib, ms, parser, percent, quiet, table
from benchmarks.contenders import FSDP2, FSDP2_COMPILED, OURS, UNSHARDED, Setup
from benchmarks.hardware import measured, named, plan_of
from benchmarks.measure import alternate
from benchmarks.models import LlamaSize
from benchmarks.network.emulated import Network, World, emulated_world
from benchmarks.network.traffic import full_sharding_bytes
from benchmarks.network.wire import Link
from benchmarks.steps import Prepared, forget_compiles, prepare
from fsdp_compile.cost.hardware import DEVICES, Hardware, Port

HOSTS = PER_HOST = 2
CONTENDERS = (UNSHARDED, FSDP2, FSDP2_COMPILED, OURS)
_UNLIMITED = Link(bytes_per_s=1e15)


@dataclasses.dataclass(frozen=True)
class Ratios:
    """How slow the links are.

    Attributes:
        between: Time of `3 P (N-1)/N` bytes of one rank's part between hosts, over compute.
        inside: Time of the collectives of tensor parallelism inside of a host, over compute.
    """

    between: float
    inside: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("two_links", "Step time of FSDP with tensor parallelism on two links, beside what it takes at least.")
    made.add_argument("--rounds", type=int, default=10, metavar="N", help="steps of each contender (default: 10)")
    made.add_argument("--latency-us", type=float, default=50.0, metavar="US", help="per collective (default: 50)")
    made.add_argument(
        "--between", type=float, nargs="+", default=[0.5, 1.0], metavar="RATIO",
        help="time of FSDP between hosts over compute (default: 0.5 1)",
    )  # fmt: skip
    made.add_argument(
        "--inside", type=float, nargs="+", default=[0.05, 0.1], metavar="RATIO",
        help="time of tensor parallelism inside of a host over compute (default: 0.05 0.1)",
    )  # fmt: skip
    made.add_argument("--lower", choices=("inductor", "eager"), default="inductor", help="of ours (default: inductor)")
    arguments = made.parse_args(argv)
    quiet()
    torch.set_num_threads(1)
    if arguments.smoke:
        arguments.rounds, arguments.between, arguments.inside = 2, arguments.between[:1], arguments.inside[:1]
    size = models.SMOKE if arguments.smoke else models.TWO_CORES
    rows = []
    for between in arguments.between:
        for inside in arguments.inside:
            found = run(size, Ratios(between, inside), arguments)
            _print(found)
            rows += found
    settings = {"rounds": arguments.rounds, "latency_us": arguments.latency_us, "hosts": HOSTS, "per_host": PER_HOST}
    return finish(arguments, settings, rows)


def run(size: LlamaSize, ratios: Ratios, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures all contenders on links of these speeds; a row for each."""
    forget_compiles()
    network = Network(_UNLIMITED, node=_UNLIMITED, ranks_per_node=PER_HOST)
    with emulated_world(HOSTS * PER_HOST, network) as world:
        mesh = init_device_mesh("cpu", (HOSTS, PER_HOST), mesh_dim_names=("dp", "tp"))
        whole = models.llama(size)
        task = dataclasses.replace(whole, make=lambda: split(whole.make(), mesh["tp"]))
        setup = Setup(task.block, mesh=mesh["dp"], options={"lower": arguments.lower})
        ready, failed = prepare([UNSHARDED], task, setup)
        compute = _Compute(world, ready[UNSHARDED.name].step)
        alone = alternate({UNSHARDED.name: compute}, rounds=arguments.rounds)[UNSHARDED.name]
        compute_s = statistics.median(compute.seconds(alone.seconds))
        own_bytes = _sent(world, ready[UNSHARDED.name])[1]
        sent = full_sharding_bytes(local_bytes(task.make()), HOSTS)
        latency_s = arguments.latency_us * 1e-6
        between = Link(sent / (ratios.between * compute_s), latency_s)
        inside = Link(own_bytes / (ratios.inside * compute_s), latency_s)
        informed = told(setup, size, between, inside)
        prepared, errors = prepare([one for one in CONTENDERS if one is not UNSHARDED], task, informed)
        ready, failed = {**ready, **prepared}, {**failed, **errors}
        traffic = {name: _sent(world, one) for name, one in ready.items()}
        world.change(between, inside)
        steps: dict[str, Callable[[], None]] = {name: one.step for name, one in ready.items()}
        steps[UNSHARDED.name] = compute
        samples = alternate(steps, rounds=arguments.rounds)
    samples[UNSHARDED.name].seconds = computed_s = compute.seconds(samples[UNSHARDED.name].seconds)
    links = (between, inside)
    rows = [
        {"contender": name, **one.to_dict(), **_shares(one.seconds, computed_s, traffic[name], links)}
        for name, one in samples.items()
    ]
    rows += [{"contender": name, **one.to_dict()} for name, one in failed.items()]
    return [{**dataclasses.asdict(ratios), **row} for row in rows]


def _shares(
    seconds: Sequence[float], computed_s: Sequence[float], sent: tuple[float, float], links: tuple[Link, Link]
) -> dict[str, float]:
    """How near a contender came to what its lanes take, and what it sent; nothing if it failed."""
    if not seconds or len(seconds) != len(computed_s):
        return {}
    sending_s = max(size / link.bytes_per_s for size, link in zip(sent, links, strict=True))
    busy_s = [max(compute_s, sending_s) for compute_s in computed_s]
    shares = [least / own for least, own in zip(busy_s, seconds, strict=True)]
    return {
        "busy_s": statistics.median(busy_s),
        "share_of_busy": statistics.median(shares),
        "between_bytes": sent[0],
        "inside_bytes": sent[1],
    }


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Splits transformers' Llama over a mesh: heads, hidden units and vocabulary."""
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    block: dict[str, ParallelStyle] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    block |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    outer: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, {**block, **outer})


def local_bytes(model: nn.Module) -> int:
    """Bytes of this rank's part of all parameters."""
    here = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(part.numel() * part.element_size() for part in here)


def told(setup: Setup, size: LlamaSize, between: Link, inside: Link) -> Setup:
    """The same with links and operators named to our planner, as users name theirs, and what is kept left to it."""
    near = named("emulated, inside", inside.bytes_per_s, inside.latency_s * 1e6)
    far = named("emulated, between", between.bytes_per_s, between.latency_s * 1e6, Port.RANK)
    part = dataclasses.replace(
        size,
        hidden=size.hidden // PER_HOST,
        heads=size.heads // PER_HOST,
        key_heads=size.key_heads // PER_HOST,
        vocabulary=size.vocabulary // PER_HOST,
        head_width=size.width // size.heads,
    )
    task = models.llama(part)
    alone = Setup(task.block, options={**setup.options, "hardware": Hardware(DEVICES["cpu"], far)})
    cpu = measured(plan_of(task, alone, HOSTS * PER_HOST)).device
    there = Hardware(dataclasses.replace(cpu, near=near), far, ranks_per_host=PER_HOST)
    options = {**setup.options, "hardware": there}
    return dataclasses.replace(setup, options=options, reshard_after_forward="auto")


class _Compute:
    """A step during which the links take no time."""

    def __init__(self, world: World, step: Callable[[], None]) -> None:
        self._world, self._step = world, step
        self._fills_s: list[float] = []

    def __call__(self) -> None:
        """Runs it, and notes how long outputs of collectives were written."""
        between, inside = self._world.network.link, self._world.network.node
        self._world.change(_UNLIMITED, _UNLIMITED)
        self._world.reset()
        try:
            self._step()
        finally:
            self._world.change(between, inside)
        self._fills_s.append(self._world.traffic.fill_s)

    def seconds(self, measured: Sequence[float]) -> list[float]:
        """What `alternate` has just measured, of two calls the second, without the time of writing outputs."""
        fills_s = self._fills_s[-2 * len(measured) :][1::2]
        return [second - fill for second, fill in zip(measured, fills_s, strict=True)]


def _sent(world: World, prepared: Prepared) -> tuple[float, float]:
    """Bytes that one step sends between hosts, and inside of a host."""
    world.reset()
    prepared.step()
    inside = world.traffic.node_bytes
    return world.traffic.total_bytes - inside, inside


def _print(rows: Sequence[dict[str, Any]]) -> None:
    ratios = rows[0]
    table(
        f"between hosts {ratios['between']:g} x compute, inside {ratios['inside']:g} x compute",
        rows,
        {
            "contender": str,
            "median_s": ms,
            "busy_s": ms,
            "share_of_busy": percent,
            "between_bytes": mib,
            "inside_bytes": mib,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
