"""Whether ranks that draw random numbers for one model draw the same ones."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from fsdp_compile.errors import RankMismatchError
from fsdp_compile.parameters.exchange import group_named
from fsdp_compile.parameters.spec import ReadSpec


def fingerprint(device: torch.device) -> int:
    """A number that tells states of the default generators (of the CPU and of `device`) apart."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    digest = hashlib.sha256(b"".join(bytes(state.tolist()) for state in states)).digest()
    return int.from_bytes(digest[:7], "big")


def check_alike(before: int, after: int, spec: ReadSpec, device: torch.device) -> None:
    """Refuses an initialization for which ranks drew different numbers. All ranks of the mesh call it together.

    Args:
        before: `fingerprint` before the initialization.
        after: And after it.
        spec: A parameter of the mesh.
        device: Where the mesh's groups communicate.

    Raises:
        RankMismatchError: On all ranks, if numbers were drawn and states differed before.
    """
    groups = [spec.group] * (spec.size > 1) + [spec.replicate_group] * (spec.replicas > 1)
    bounds = torch.tensor([before, -before, int(after != before)], device=device)
    for name in groups:
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group_named(name))
    largest, smallest, drew = bounds[0].item(), -bounds[1].item(), bounds[2].item()
    if drew and largest != smallest:
        raise RankMismatchError(
            "ranks drew different random numbers to initialize one model, and each keeps its part",
            where="materialize",
            instead="torch.manual_seed(seed) with the same seed on every rank right before, or "
            "fully_shard(..., param_init_fn=..., sync_module_states=True)",
        )
