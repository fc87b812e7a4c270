"""A step on a real slow network: two processes in two network namespaces at 1 Gbit/s, `fsdp_compile` beside FSDP2.

Needs Linux, root and iproute2. Compute (`unsharded`) and communication alone stand beside, to tell how the two compare;
`--tokens` moves compute.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import contenders, models
from benchmarks.command import finish, ms, parser, quiet, table
from benchmarks.contenders import Setup
from benchmarks.measure import alternate
from benchmarks.models import LlamaSize
from benchmarks.network import namespaces
from benchmarks.network.traffic import full_sharding_bytes
from benchmarks.steps import prepare

_SIZE = LlamaSize(layers=6, width=512, hidden=1408, heads=8, key_heads=8, vocabulary=4096, batch=4, tokens=256)
_NAMES = ("fsdp2", "fsdp_compile")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("slow_network", "Step time in two network namespaces: fsdp_compile beside FSDP2, over real gloo.")
    made.add_argument("--gbit-per-s", type=float, default=1.0, metavar="X", help="rate of the link (default: 1)")
    made.add_argument("--rounds", type=int, default=10, metavar="N", help="steps of each contender (default: 10)")
    made.add_argument("--tokens", type=int, default=_SIZE.tokens, metavar="N", help="per sequence; moves compute")
    made.add_argument("--as-rank", action="store_true", help="be one of the ranks, as torchrun's environment says")
    arguments = made.parse_args(argv)
    quiet()
    if arguments.smoke:
        arguments.rounds = 2
    size = models.SMOKE if arguments.smoke else dataclasses.replace(_SIZE, tokens=arguments.tokens)
    if arguments.as_rank:
        print(json.dumps(run_rank(arguments.rounds, size)))
        return 0
    own = [
        "--as-rank",
        "--rounds",
        str(arguments.rounds),
        "--tokens",
        str(arguments.tokens),
        *(["--smoke"] if arguments.smoke else []),
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was made is removed
    try:
        with namespaces.slow_network(arguments.gbit_per_s) as hosts:
            printed = namespaces.run_ranks(hosts, "benchmarks.slow_network", own, timeout_s=550)
    except namespaces.UnavailableError as error:
        print(f"benchmarks.slow_network: {error}", file=sys.stderr)
        return 2
    measured = json.loads(printed[0].splitlines()[-1])
    rows = _rows(measured, arguments.gbit_per_s)
    table(f"{arguments.gbit_per_s:g} Gbit/s", rows, {"contender": str, "median_s": ms, "faster_than_fsdp2": _times})
    settings = {"gbit_per_s": arguments.gbit_per_s, "rounds": arguments.rounds, **measured["settings"]}
    return finish(arguments, settings, rows)


def run_rank(rounds: int, size: LlamaSize) -> dict[str, Any]:
    """Measures as one rank; all ranks take the same turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        task = models.llama(size)
        size_bytes = models.parameter_bytes(task.make())
        ready, failed = prepare(contenders.chosen(("unsharded", *_NAMES)), task, Setup(task.block))
        samples = alternate({name: prepared.step for name, prepared in ready.items()}, rounds=rounds)
        ranks = dist.get_world_size()
    finally:
        dist.destroy_process_group()
    rows = {name: one.to_dict() for name, one in {**samples, **failed}.items()}
    settings = {"parameter_bytes": size_bytes, "full_sharding_bytes": full_sharding_bytes(size_bytes, ranks)}
    return {"settings": settings, "contenders": rows}


def _rows(measured: dict[str, Any], gbit_per_s: float) -> list[dict[str, Any]]:
    reference_s = measured["contenders"]["fsdp2"].get("median_s")
    rows = []
    for name, values in measured["contenders"].items():
        row = {"contender": name, **values}
        if reference_s and "median_s" in values and name in _NAMES:
            row["faster_than_fsdp2"] = reference_s / values["median_s"]
        rows.append(row)
    communication_s = measured["settings"]["full_sharding_bytes"] / (gbit_per_s * 1e9 / 8)
    return [*rows, {"contender": "communication alone, calculated", "median_s": communication_s}]


def _times(ratio: float) -> str:
    return f"{ratio:.2f} x"


if __name__ == "__main__":
    sys.exit(main())
