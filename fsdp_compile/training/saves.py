"""When the checkpoints of a run are written: while training waits, or while it goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from fsdp_compile.errors import CheckpointError
from fsdp_compile.training.checkpoint import finite_state, save_checkpoint, write_checkpoint
from fsdp_compile.training.checkpoint_folder import CheckpointFolder
from fsdp_compile.training.staging import HostBuffers
from fsdp_compile.training.world import World


class BlockingSaves:
    """Training waits until a checkpoint is complete. Every rank calls every method."""

    def __init__(self, folder: CheckpointFolder, world: World, *, keep: int) -> None:
        self._folder = folder
        self._world = world
        self._keep = keep

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        """Write a checkpoint.

        Args:
            step: Steps done.
            model: Its parameters are DTensors.
            optimizer: Has stepped at least once.

        Returns:
            Which older checkpoints cannot be removed and why, one sentence each; the same on all ranks.

        Raises:
            CheckpointError: A value is not finite, or a file cannot be written; on all ranks.
        """
        return save_checkpoint(self._folder, step, model, optimizer, self._world, keep=self._keep)

    def poll(self) -> tuple[str, ...]:
        """Nothing: `save` has said it."""
        return ()

    def wait(self) -> tuple[str, ...]:
        """Nothing: `save` has waited."""
        return ()

    def close(self) -> None:
        """Nothing: there is no thread."""


class BackgroundSaves:
    """Training waits for a copy to the host alone; a thread of each rank writes it. Every rank calls every method.

    The threads agree over a process group of their own, so that their collectives and those of training never mix. What
    they write is what `BlockingSaves` writes, and as complete. One save runs at a time.
    """

    def __init__(self, folder: CheckpointFolder, world: World, *, keep: int) -> None:
        self._folder = folder
        self._world = world
        self._keep = keep
        self._apart = world.apart()
        self._buffers = HostBuffers()
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_use_device, initargs=(world.device,))
        self._running: Future[tuple[str, ...]] | None = None

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        """Begin to write a checkpoint of what there is now; wait for the one before first.

        Args:
            step: Steps done.
            model: Its parameters are DTensors.
            optimizer: Has stepped at least once.

        Returns:
            What `wait` returns, of the checkpoint before.

        Raises:
            CheckpointError: A value is not finite, or the checkpoint before could not be written; on all ranks.
        """
        problems = self.wait()
        staged = self._buffers.stage(finite_state(model, optimizer, step, self._world))
        self._running = self._thread.submit(write_checkpoint, self._folder, step, staged, self._apart, keep=self._keep)
        return problems

    def poll(self) -> tuple[str, ...]:
        """Say how the save ended, if it has on all ranks; called between steps.

        Returns:
            What `wait` returns, or nothing.

        Raises:
            CheckpointError: The checkpoint could not be written; on all ranks.
            Exception: Whatever else ended the save of this rank.
        """
        if self._running is None:
            return ()
        ended = self._running.done()
        if ended and not isinstance(error := self._running.exception(), CheckpointError | None):
            raise error  # a bug, of this rank alone: the others would wait for it for ever
        is_running = self._world.any(torch.tensor(not ended, device=self._world.device))
        return () if is_running else self.wait()

    def wait(self) -> tuple[str, ...]:
        """Wait until the checkpoint is complete.

        Returns:
            Which older checkpoints cannot be removed and why, one sentence each; the same on all ranks.

        Raises:
            CheckpointError: It could not be written; on all ranks.
        """
        running, self._running = self._running, None
        return () if running is None else running.result()

    def close(self) -> None:
        """End the thread, after the save that it is at; also where training failed, and other ranks do not come."""
        self._thread.shutdown()


Saves = BlockingSaves | BackgroundSaves


def _use_device(device: torch.device) -> None:
    """Let a new thread use the GPU of its rank, instead of the first one, where torch asks for a stream."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
