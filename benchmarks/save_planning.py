"""What rank 0 does for a save of Llama-3-8B and AdamW beside writing its own shard, by the number of ranks.

One process is rank 0; what the others would send is made beforehand. Counted is processor time, for the plans that rank
0 reads, makes and sends, and for the metadata that it writes of where everything is. Sending itself is not in it.
"""

from __future__ import annotations

import dataclasses
import pickle
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import models
from benchmarks._torch import StorageInfo, fake_store
from benchmarks.command import Columns, finish, parser, quiet, table
from fsdp_compile.training.save_plan import OwnPlanner, Places, PlannedWriter


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    made = parser("save_planning", "Seconds of rank 0 for the plan and the metadata of a save, by the number of ranks.")
    made.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 16, 128, 1024], metavar="N", help="default: 2 16 128 1024"
    )
    arguments = made.parse_args(argv)
    quiet()
    if arguments.smoke:
        arguments.ranks = [2, 3]
    size = models.SMOKE if arguments.smoke else models.LLAMA_3_8B
    rows: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        rows += run(size, ranks)
    columns: Columns = {
        "ranks": str,
        "contender": str,
        "plan_s": _seconds,
        "metadata_s": _seconds,
        "received_bytes": _mb,
        "metadata_bytes": _mb,
    }
    table("rank 0 of a save", rows, columns)
    return finish(arguments, {}, rows)


def run(size: models.LlamaSize, ranks: int) -> list[dict[str, Any]]:
    """Plans a save both ways."""
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=ranks)
    try:
        state = _state(models.llama(size, device="meta").make(), init_device_mesh("cpu", (ranks,)))
        return [_torchs(state, ranks), _ours(state, ranks)]
    finally:
        dist.destroy_process_group()


def _torchs(state: dict[str, Any], ranks: int) -> dict[str, Any]:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, is_coordinator=True)
    own = planner.create_local_plan()
    sent = [pickle.dumps(_plan_of(own, rank, ranks)) for rank in range(ranks)]
    times: dict[str, float] = {}
    with _timed(times, "plan_s"):
        plans, metadata = planner.create_global_plan([pickle.loads(plan) for plan in sent])
        for plan in plans:
            pickle.dumps(plan)
    results = [pickle.dumps(_results(plan, rank)) for rank, plan in enumerate(plans)]
    with tempfile.TemporaryDirectory() as folder:
        with _timed(times, "metadata_s"):
            FileSystemWriter(folder).finish(metadata, [pickle.loads(each) for each in results])
        return _row("dcp.save", ranks, times, [*sent, *results], Path(folder))


def _ours(state: dict[str, Any], ranks: int) -> dict[str, Any]:
    planner = OwnPlanner(0, ranks)
    planner.set_up_planner(state, None, is_coordinator=True)
    sent = [pickle.dumps(planner.create_local_plan())] * ranks
    times: dict[str, float] = {}
    with _timed(times, "plan_s"):
        plans, metadata = planner.create_global_plan([pickle.loads(plan) for plan in sent])
        for plan in plans:
            pickle.dumps(plan)
    results = [
        pickle.dumps([Places(f"__{rank}_0.distcp", *[array("q", range(len(written)))] * 2)])
        for rank, written in enumerate(planner.written_by_ranks())
    ]
    with tempfile.TemporaryDirectory() as folder:
        with _timed(times, "metadata_s"):
            PlannedWriter(Path(folder), planner).finish(metadata, [pickle.loads(each) for each in results])
        return _row("fsdp_compile", ranks, times, [*sent, *results], Path(folder))


def _row(
    contender: str, ranks: int, times: dict[str, float], received: Sequence[bytes], folder: Path
) -> dict[str, Any]:
    written = sum(path.stat().st_size for path in folder.iterdir())
    sizes = {"received_bytes": sum(map(len, received)), "metadata_bytes": written}
    return {"ranks": ranks, "contender": contender, **times, **sizes}


def _state(model: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
    """The state of a model and its AdamW, without memory."""
    parameters = dict(model.named_parameters())
    optimizer: dict[str, Any] = {
        name: {"step": torch.tensor(1.0), "exp_avg": _sharded(each, mesh), "exp_avg_sq": _sharded(each, mesh)}
        for name, each in parameters.items()
    }
    settings = torch.optim.AdamW([nn.Parameter(torch.ones(1))]).param_groups[0] | {"params": list(parameters)}
    return {
        "model": {name: _sharded(each, mesh) for name, each in parameters.items()},
        "optimizer": {"state": optimizer, "param_groups": [settings]},
    }


def _sharded(full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    rows = min(-(-full.shape[0] // mesh.size()), full.shape[0])
    local = full.detach().new_empty((rows, *full.shape[1:]))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())


def _plan_of(own: SavePlan, rank: int, ranks: int) -> SavePlan:
    """What another rank would plan, out of rank 0's plan."""
    return dataclasses.replace(own, items=[_item_of(item, rank, ranks) for item in own.items])


def _item_of(item: WriteItem, rank: int, ranks: int) -> WriteItem:
    data = item.tensor_data
    if data is None or data.chunk.sizes == data.size:  # no tensor, or one that all ranks have
        return item
    step = -(-data.size[0] // ranks)
    begin = min(rank * step, data.size[0])
    offsets = torch.Size([begin, *[0] * (len(data.size) - 1)])
    chunk = ChunkStorageMetadata(offsets, torch.Size([min(step, data.size[0] - begin), *data.size[1:]]))
    index = MetadataIndex(item.index.fqn, offsets)
    return dataclasses.replace(item, index=index, tensor_data=dataclasses.replace(data, chunk=chunk))


def _results(plan: SavePlan, rank: int) -> list[WriteResult]:
    file = f"__{rank}_0.distcp"
    return [WriteResult(item.index, 1, StorageInfo(file, place, 1)) for place, item in enumerate(plan.items)]


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    start_s = time.process_time()
    yield
    times[name] = time.process_time() - start_s


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"


def _mb(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.2f} MB"


if __name__ == "__main__":
    sys.exit(main())
