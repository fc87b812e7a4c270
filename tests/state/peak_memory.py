"""How much memory a rank takes, beside its shards, to get full values in each way: a program.

    python -m tests.state.peak_memory RANK WORLD_SIZE FOLDER BLOCKS WIDTH

A process of its own, by the kernel's count of its resident pages. It writes the numbers into FOLDER.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fsdp_compile import full_params, full_tensors
from tests.sharding.peak_memory import forget_peak, materialized, resident_bytes


def _all_at_once(model: nn.Module) -> None:
    with full_params(model, rank0_only=True, writeback=False, offload_to_cpu=True):
        pass


def _one_by_one(model: nn.Module) -> None:
    for _, value in full_tensors(model):
        del value


def _one_by_one_on_rank_0(model: nn.Module) -> None:
    for _, value in full_tensors(model, rank0_only=True, cpu_offload=True):
        del value


def _kept_on_rank_0(model: nn.Module) -> None:
    dict(full_tensors(model, rank0_only=True, cpu_offload=True))


def _torchs(model: nn.Module) -> None:
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "full_params, rank 0": _all_at_once,
    "full_tensors": _one_by_one,
    "full_tensors, rank 0": _one_by_one_on_rank_0,
    "full_tensors, rank 0, kept": _kept_on_rank_0,
    "get_model_state_dict, rank 0": _torchs,
}


def measure(blocks: int, width: int) -> dict[str, int]:
    """Peaks above what the process holds already, its shards among that."""
    model = materialized(blocks, width)
    peaks = {}
    for name, way in WAYS.items():
        gc.collect()
        dist.barrier()
        before = resident_bytes("VmRSS")
        forget_peak()
        way(model)
        peaks[name] = resident_bytes("VmHWM") - before
    return peaks


def main(rank: int, world_size: int, folder: Path, blocks: int, width: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    measure(3, 8)  # loads code, starts threads and connects ranks
    (folder / f"rank-{rank}.json").write_text(json.dumps(measure(blocks, width)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
