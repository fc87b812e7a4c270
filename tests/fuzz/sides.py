"""The two sides of a comparison: the ranks, and one process that takes the shares of all ranks one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp_compile

Share = tuple[torch.Tensor, torch.Tensor]
Notes = dict[str, torch.Tensor | None]


class Side:
    """What a program's `train` calls; where a method does nothing here, ranks have something to do.

    Attributes:
        rank: The rank whose share this is.
        notes: What was seen, by name: losses, gradients before each update, parameters and buffers at the end.
    """

    rank: int

    def __init__(self, model: nn.Module, world: int, dtype: torch.dtype = torch.float32) -> None:
        self.model = model
        self.world = world
        self.dtype = dtype
        self.notes: Notes = {}
        self._seen: dict[str, int] = {}
        self._batches = 0

    def shares(self, rows: int, *, uneven: bool = False) -> Iterator[Share]:
        """What one rank has of the next batch; in one process, the shares of all ranks."""
        raise NotImplementedError

    def backward(self, loss: torch.Tensor, **arguments: Any) -> None:
        """Backward of the loss of one share."""
        self.note_own("loss", loss)
        self.scaled(loss).backward(**arguments)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The part of the loss of one share in that of the batch; ranks average by themselves."""
        return loss

    def no_sync(self, model: Any) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002  what ranks need
        """Backwards inside of it accumulate."""
        return contextlib.nullcontext()

    def set_sync(self, model: Any, sync: bool) -> None:  # noqa: FBT001  as in FSDP2
        """FSDP2's `set_requires_gradient_sync`."""

    def full_params(self, model: Any) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002  what ranks need
        """Plain, full parameters, whose new values stay."""
        return contextlib.nullcontext()

    def method(self, model: Any, name: str, *arguments: Any) -> None:
        """Calls a method of sharded modules."""

    def flat_step(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Our `flat_step`, which returns what it is given."""
        return optimizer

    def note(self, name: str, value: torch.Tensor | None) -> None:
        """Notes a value that is the same on all ranks."""
        number = self._seen[name] = self._seen.get(name, -1) + 1
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if value is not None and value.is_sparse:
            value = value.to_dense()
        self.notes[f"{name}, {number}"] = None if value is None else value.detach().clone()

    def note_own(self, name: str, value: torch.Tensor) -> None:
        """Notes a value of one rank's share."""
        self.note(f"{name} of rank {self.rank}", value)

    def see_gradients(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.note(f"gradient of {name}", parameter.grad)

    def see_the_end(self) -> None:
        """Notes parameters; sides note the buffers of their ranks, too."""
        for name, parameter in self.model.named_parameters():
            self.note(f"parameter {name}", parameter)

    def _share(self, rank: int, rows: int, *, uneven: bool) -> Share:
        generator = torch.Generator().manual_seed(1000 * self._batches + rank)
        rows += 2 * rank * uneven
        x = torch.randn(rows, 6, generator=generator).to(self.dtype)
        return x, torch.randint(7, (rows, 3), generator=generator)


class Ranks(Side):
    """One of the ranks of a sharded model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, dist.get_world_size())
        self.rank = dist.get_rank()

    def shares(self, rows: int, *, uneven: bool = False) -> Iterator[Share]:
        self._batches += 1
        yield self._share(self.rank, rows, uneven=uneven)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        return fsdp_compile.no_sync(model)

    def set_sync(self, model: Any, sync: bool) -> None:  # noqa: FBT001  as in FSDP2
        model.set_requires_gradient_sync(sync)

    def full_params(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return fsdp_compile.full_params(model)

    def method(self, model: Any, name: str, *arguments: Any) -> None:
        getattr(model, name)(*arguments)

    def flat_step(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return fsdp_compile.flat_step(optimizer)

    def see_the_end(self) -> None:
        """Also notes which trained parameters are not sharded."""
        super().see_the_end()
        for name, buffer in self.model.named_buffers():
            self.note_own(f"buffer {name}", buffer)
        for name, parameter in self.model.named_parameters():
            if not isinstance(parameter, DTensor):
                self.notes[f"parameter {name} is not sharded"] = None


class Fsdp2Ranks(Ranks):
    """One of the ranks of a model that torch's `fully_shard` sharded."""

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    def flat_step(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def see_the_end(self) -> None:
        """An evaluation leaves the parameters of FSDP2's root unsharded."""
        model: Any = self.model
        model.reshard()
        super().see_the_end()


class OneProcess(Side):
    """All shares in one process; buffers are those of the rank whose share is computed."""

    def __init__(self, model: nn.Module, world: int, dtype: torch.dtype) -> None:
        super().__init__(model, world, dtype)
        self.rank = 0
        self._buffers = [self._copies() for _ in range(world)]

    def shares(self, rows: int, *, uneven: bool = False) -> Iterator[Share]:
        self._batches += 1
        for rank in range(self.world):
            self.rank = rank
            with torch.no_grad():
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(self._buffers[rank][name])
            yield self._share(rank, rows, uneven=uneven)
            self._buffers[rank] = self._copies()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The average over ranks is that of their losses."""
        return loss / self.world

    def see_the_end(self) -> None:
        super().see_the_end()
        for rank, buffers in enumerate(self._buffers):
            self.rank = rank
            for name, buffer in buffers.items():
                self.note_own(f"buffer {name}", buffer)

    def _copies(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
