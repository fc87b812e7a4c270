"""Checkpoints of a run, through torch.distributed.checkpoint (DCP): each rank writes its own shards, all are verified.

`checkpoint_folder.py` says what lies where. A problem of one rank is raised on all, as DCP does.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.futures import Future

from fsdp_compile._torch.distributed import timeout_of
from fsdp_compile.comm.groups import World
from fsdp_compile.errors import CheckpointError, ConfigError
from fsdp_compile.formats.dcp import METADATA, NamingWriter, SafePlanner, SafeReader
from fsdp_compile.formats.files import FileDigest, named
from fsdp_compile.training.checkpoint_folder import CheckpointFolder, step_of


class Saves(NamingWriter):
    """Writes the checkpoints of a run, one at a time, of which `keep` good ones stay. Every rank calls each method.

    `save` to `wait` return, on rank 0, which older checkpoints cannot be removed and why, one sentence each. They raise
    `CheckpointError` on all ranks if a value is not finite or a file cannot be written; checkpoints that were complete
    are as they were. In the background, training waits only until a copy is on the host, which takes as much memory as
    this rank has parameters and optimizer state.
    """

    def __init__(self, folder: CheckpointFolder, world: World, *, keep: int, in_background: bool = False) -> None:
        super().__init__(folder.partial)
        self._folder = folder
        self._world = world
        self._keep = keep
        self._step = 0
        self._problems: tuple[str, ...] = ()
        self._running: concurrent.futures.Future[Metadata] | None = None
        self._stager: DefaultStager | None = None
        self._group: dist.ProcessGroup | None = None
        if in_background:
            on_gpu = world.device.type == "cuda"
            copy = {"use_pinned_memory": on_gpu, "use_non_blocking_copy": on_gpu}
            self._stager = DefaultStager(StagingOptions(use_shared_memory=False, use_async_staging=False, **copy))
            self.per_thread_copy_ahead = 0  # DCP's thread, which reads a copy on the host, needs no stream of a GPU
            assert dist.group.WORLD is not None
            # Of its own, so that collectives of DCP's thread and of training never mix. Torch would let it wait 30
            # minutes, whatever the world has.
            self._group = dist.new_group(backend="gloo", timeout=timeout_of(dist.group.WORLD))

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        """Write a checkpoint of `step` done steps, or begin to, when the one before is complete.

        The parameters are DTensors, and the optimizer has stepped at least once.
        """
        problems = self.wait()
        self._step = step
        how: Any = {"storage_writer": self, "planner": _FinitePlanner(), "process_group": self._group}
        if self._stager is not None:
            running: Any = dcp.async_save(_state(model, optimizer), async_stager=self._stager, **how)
            self._running = running
            return problems
        with self._errors_named():
            dcp.save(_state(model, optimizer), **how)
        return self._problems

    def poll(self) -> tuple[str, ...]:
        """Say how the save in the background ended, if it has on all ranks; called between steps."""
        if self._running is None:
            return ()
        is_running = torch.tensor(not self._running.done(), device=self._world.device)
        return () if self._world.any(is_running) else self.wait()

    def wait(self) -> tuple[str, ...]:
        """Wait until the checkpoint that is being written is complete."""
        if self._running is None:
            return ()
        running, self._running = self._running, None
        with self._errors_named():
            running.result()
        return self._problems

    def close(self) -> None:
        """Wait for the end of the save; also where training failed, and other ranks do not come."""
        if self._running is not None:
            concurrent.futures.wait([self._running])

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except CheckpointException as error:
            if self._world.rank == 0:
                self._folder.abandon()
            self._world.gather(None)  # the others wait: with the first rank that ends, a launcher ends all
            newest = self._folder.newest()
            raise CheckpointError(
                named(error, "rank {rank} cannot write", self._folder.partial),
                where=f"step {self._step}",
                instead=f"go on from {newest}, which is complete" if newest else None,
            ) from None

    # What DCP calls, in this order: the plans of all ranks meet on rank 0 before any rank writes.

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Write nothing yet: torch would write into what is left over from another save."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: make room."""
        self._folder.begin()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write this rank's file, and add its digest to what DCP is told."""
        written = super().write_data(plan, planner).value()
        names = {each.storage_data.relative_path for each in written}
        made: Future[Any] = Future()
        made.set_result((written, {name: FileDigest.of(self._folder.partial / name) for name in names}))
        return made

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """On rank 0, when the files of all ranks are on disk: complete the checkpoint."""
        super().finish(metadata, [written for written, _ in results])
        files = {name: digest for _, digests in results for name, digest in digests.items()}
        files[METADATA] = FileDigest.of(self._folder.partial / METADATA)
        self._problems = self._folder.finish(self._step, files, keep=self._keep)


def load_checkpoint(
    folder: CheckpointFolder, model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> tuple[int, list[str]]:
    """Load the newest complete checkpoint into sharded parameters; every rank calls this.

    Parameters are written in place. The number of ranks may differ from that which wrote it. Nothing in a checkpoint
    is executed.

    Returns:
        Its steps, and why newer checkpoints were not loaded, one sentence each.

    Raises:
        ConfigError: There is no complete checkpoint.
    """
    skipped: list[str] = []
    for checkpoint in world.gather(folder.candidates())[0]:
        reader, problem = SafeReader(checkpoint), None
        try:
            reader.check(folder.read_marker(checkpoint).files, world.rank, world.size)
        except CheckpointError as error:
            problem = error.what
        if problems := list(filter(None, world.gather(problem))):
            skipped.append(problems[0])
            continue
        state = _state(model, optimizer)
        try:
            dcp.load(state, storage_reader=reader, planner=SafePlanner())
        except CheckpointException as error:
            skipped.append(named(error, "rank {rank} cannot load", checkpoint))
        else:
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            return step_of(checkpoint), skipped
    what = "; ".join([f"there is no complete checkpoint in {folder.path}", *skipped])
    raise ConfigError(what, where="--resume", instead="a new run")


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds: nested dictionaries of DTensors, tensors and plain values, not copied."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


class _FinitePlanner(DefaultSavePlanner):
    """Refuses values that are not finite, before anything is written."""

    def create_local_plan(self) -> SavePlan:
        for name, value in self.state_dict.items():
            local = value.to_local() if isinstance(value, DTensor) else value
            if isinstance(local, Tensor) and not torch.isfinite(local).all():
                where = f"{name} has values on rank {dist.get_rank()} that are not finite"
                raise CheckpointError(f"{where}, so that no checkpoint is written")
        return super().create_local_plan()
