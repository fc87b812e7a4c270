"""A step of Muon on real ranks: each matrix updated by its owner (`whole_step`), beside all matrices on all ranks.

The ranks are processes of this machine over gloo. "everywhere" is the way of `whole_step` for parameters that stay
where they are: each is gathered with its gradient and its state, and updated on every rank.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.optim.optimizer import register_optimizer_step_post_hook

import fsdp_compile
from benchmarks import models
from benchmarks.command import Columns, finish, mib, ms, parser, quiet, table
from benchmarks.measure import alternate
from benchmarks.models import LlamaSize
from benchmarks.peak import measured_peak_bytes, storage_bytes
from fsdp_compile.optim import owners, whole_step

_SIZE = LlamaSize(layers=12, width=128, hidden=344, heads=8, key_heads=8, vocabulary=1024, batch=1, tokens=16)
OWNERS, EVERYWHERE = "whole_step", "everywhere"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("matrix_optimizers", "A step of Muon whose matrices have owners, beside one on every rank.")
    made.add_argument("--ranks", type=int, default=4, metavar="N", help="processes (default: 4)")
    made.add_argument("--rounds", type=int, default=6, metavar="N", help="steps of each (default: 6)")
    arguments = made.parse_args(argv)
    quiet()
    size, rounds = (models.SMOKE, 2) if arguments.smoke else (_SIZE, arguments.rounds)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_run_rank, (arguments.ranks, rounds, size, folder), nprocs=arguments.ranks)
        said = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(arguments.ranks)]
    rows = [_row(name, [each[name] for each in said]) for name in (OWNERS, EVERYWHERE)]
    for row in rows:
        row["over_everywhere"] = row["median_s"] / rows[-1]["median_s"]
    columns: Columns = {
        "contender": str,
        "median_s": ms,
        "over_everywhere": lambda ratio: f"{ratio:.2f} x",
        "updates": str,
        "most_of_a_rank": str,
        "largest_cost_over_mean": lambda ratio: f"{ratio:.3f}",
        "received_bytes": mib,
        "least_bytes": mib,
        "peak_bytes": mib,
    }
    table(f"step of Muon, {arguments.ranks} ranks", rows, columns)
    return finish(arguments, {"ranks": arguments.ranks, "rounds": rounds, "matrices": said[0]["matrices"]}, rows)


def _row(name: str, said: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks have measured, together."""
    costs = [each["cost"] for each in said]
    return {
        "contender": name,
        "median_s": max(each["median_s"] for each in said),
        "updates": sum(each["updates"] for each in said),
        "most_of_a_rank": max(each["updates"] for each in said),
        "largest_cost_over_mean": max(costs) * len(costs) / sum(costs),
        "received_bytes": max(each["received_bytes"] for each in said),
        "least_bytes": said[0]["least_bytes"],
        "peak_bytes": max(each["peak_bytes"] for each in said),
    }


def _run_rank(rank: int, ranks: int, rounds: int, size: LlamaSize, folder: str) -> None:
    """Measures as one rank, and writes what it has found."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29517", "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    quiet()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model: Any = models.llama(size).make()
    for layer in model.model.layers:
        fsdp_compile.fully_shard(layer)
    fsdp_compile.fully_shard(model)
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    for parameter in matrices:
        assert isinstance(parameter, DTensor)
        parameter.grad = torch.randn_like(parameter)
    optimizers = {name: fsdp_compile.whole_step(Muon(matrices, lr=1e-3)) for name in (OWNERS, EVERYWHERE)}
    steps: dict[str, Callable[[], None]] = {
        OWNERS: optimizers[OWNERS].step,
        EVERYWHERE: mock.patch.object(whole_step, "place_of", return_value=None)(optimizers[EVERYWHERE].step),
    }
    found: dict[str, Any] = {"matrices": len(matrices)}
    full_bytes = sum(p.numel() * p.element_size() for p in matrices)
    for name, step in steps.items():
        step()  # makes the state
        with _counted() as counts:
            peak_bytes = measured_peak_bytes(nn.ParameterList(matrices), [], step, "cpu")
        state = [value for each in optimizers[name].state.values() for value in each.values()]
        # Of a rank: gradients and parameters of those that it owns arrive, and its parts of all that are updated.
        least = 3 * full_bytes / ranks * (ranks - 1) / ranks
        found[name] = {**counts, "peak_bytes": peak_bytes + storage_bytes(state), "least_bytes": least}
    for name, samples in alternate(steps, rounds=rounds).items():
        found[name] |= samples.to_dict()
    Path(folder, str(rank)).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _counted() -> Iterator[dict[str, float]]:
    """Counts the updates of a rank, what they cost, and the bytes that it receives from others."""
    counts = {"updates": 0.0, "cost": 0.0, "received_bytes": 0.0}
    all_to_all, full = dist.all_to_all_single, DTensor.full_tensor

    def counted_all_to_all(received: torch.Tensor, sent: torch.Tensor, theirs: Any, *args: Any, **kwargs: Any) -> Any:
        counts["received_bytes"] += received.nbytes - theirs[dist.get_rank()]
        return all_to_all(received, sent, theirs, *args, **kwargs)

    def counted_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                counts["updates"] += 1
                counts["cost"] += owners.matrix_cost(parameter.shape)

    hook = register_optimizer_step_post_hook(counted_update)

    def counted_full(tensor: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        counts["received_bytes"] += (tensor.numel() - tensor.to_local().numel()) * tensor.element_size()
        return full(tensor, *args, **kwargs)

    try:
        with (
            mock.patch.object(dist, "all_to_all_single", counted_all_to_all),
            mock.patch.object(DTensor, "full_tensor", counted_full),
        ):
            yield counts
    finally:
        hook.remove()


if __name__ == "__main__":
    sys.exit(main())
