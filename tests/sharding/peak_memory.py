"""How much memory one rank takes for making a model on meta, sharding, initializing and training it one step.

    python -m tests.sharding.peak_memory RANK WORLD_SIZE FOLDER BLOCKS WIDTH

A process of its own, by the kernel's count of its resident pages. It writes the numbers into FOLDER.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import fully_shard, materialize


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.normal_(std=0.5 / self.weight.shape[0] ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ self.weight


def materialized(blocks: int, width: int) -> nn.Module:
    """A model from nothing to its first values, in shards."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    fully_shard(model)
    torch.manual_seed(0)
    materialize(model)
    return model


def train(model: nn.Module, width: int) -> None:
    """One step of gradient descent on one row, so that activations do not count."""
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager", "prefetch": 0})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    compiled(torch.randn(1, width)).square().mean().backward()
    optimizer.step()


def resident_bytes(field: str) -> int:
    """A line of the kernel's account of this process: `VmRSS` is what is resident now, `VmHWM` the most since reset."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Lets `VmHWM` start again at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(blocks: int, width: int) -> dict[str, int]:
    """Peaks above what the process holds already, and what its shards take in the end."""
    gc.collect()
    dist.barrier()
    before = resident_bytes("VmRSS")
    forget_peak()
    model = materialized(blocks, width)
    peaks = {"materialized": resident_bytes("VmHWM") - before}
    train(model, width)
    peaks["trained"] = resident_bytes("VmHWM") - before
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    shards = [tensor.to_local() for tensor in (*model.parameters(), *gradients)]  # type: ignore[attr-defined]
    return {**peaks, "share": sum(shard.nbytes for shard in shards)}


def main(rank: int, world_size: int, folder: Path, blocks: int, width: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    measure(3, 8)  # loads code, starts threads and connects ranks
    torch._dynamo.reset()
    (folder / f"rank-{rank}.json").write_text(json.dumps(measure(blocks, width)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
