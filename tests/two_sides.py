"""Two sides of a comparison, trained side by side: a model as this package runs it, and what it must equal.

The reference of `WithFsdp2` is sharded alike by torch's FSDP2 and runs in eager code on the same share of each batch:
the two are equal bit for bit. That of `WithOneProcess` is a plain model on the whole batch: equal up to rounding.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard
from fsdp_compile.fsdp2.take_over import model_of

C = TypeVar("C", bound=Callable[..., Any])
M = TypeVar("M", bound=nn.Module)
Loss = Callable[[Any, Any], torch.Tensor]
"""Of what is called for a model, and its batch."""
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIONS: dict[str, Any] = {"lower": "eager"}
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def compile_eagerly(function: C, *, fullgraph: bool = False, dynamic: bool | None = None, **options: Any) -> C:
    """The backend without Inductor: transformed graphs run operator by operator."""
    given = {**OPTIONS, **options}
    compiled: Any = torch.compile(function, backend="fsdp", options=given, fullgraph=fullgraph, dynamic=dynamic)
    return compiled


def compile_in_place(module: M, *, fullgraph: bool = False, **options: Any) -> M:
    """As `compile_eagerly`, by `module.compile`."""
    module.compile(backend="fsdp", options={**OPTIONS, **options}, fullgraph=fullgraph)
    return module


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Of (replicas, shards), or of shards alone."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def shard_blocks(model: Any, fully_shard: Callable[..., Any] = fully_shard, **arguments: Any) -> Any:
    """Each block and the rest a unit."""
    for part in (*model.blocks, model):
        fully_shard(part, **arguments)
    return model


def taken_over(model: nn.Module) -> Any:
    """What compiled code knows of a model that it has run."""
    taken = model_of(model)
    assert taken is not None
    return taken


def unique_graphs() -> int:
    """How many Dynamo has made since its counters were cleared."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def loss_of(output: Any) -> torch.Tensor:
    """A loss that averages over the batch, of any kind of output; in float32 at least."""
    output = getattr(output, "logits", output)
    return output.to(torch.promote_types(output.dtype, torch.float32)).square().mean()


def share(batch: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else batch


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The average over the world, in float32 at least."""
    value = value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
    if not dist.is_initialized():
        return value
    dist.all_reduce(value)
    return value / dist.get_world_size()


def whole(tensor: Any) -> Any:
    """The full tensor of a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Any) -> Any:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Follows the signs of gradients, so that both sides need the same ones."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Differs as much as gradients do."""
    return torch.optim.SGD(parameters, lr=0.1)


class Averaging:
    """A communication hook that averages as the default does, and notes states and sizes of gradients and outputs."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.calls: list[tuple[object, int, int]] = []
        self.group = group

    def __call__(self, state: object, gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
        self.calls.append((state, gradient.numel(), -1 if output is None else output.numel()))
        if output is None:
            dist.all_reduce(gradient, group=self.group)
        else:
            dist.reduce_scatter_tensor(output, gradient, group=self.group)
        (gradient if output is None else output).div_(dist.get_world_size(self.group))


# What is compared.


@dataclasses.dataclass(frozen=True)
class Within:
    """The relative and the absolute difference that each may have."""

    loss: tuple[float, float]
    gradient: tuple[float, float]
    parameter: tuple[float, float]


BITS = Within((0.0, 0.0), (0.0, 0.0), (0.0, 0.0))
REDUCED_TWICE = Within((1e-5, 1e-8), (1e-4, 1e-6), (1e-4, 1e-3))
"""Of a unit that two graphs read, or a graph and hooks: its gradients are reduced once for each."""
ROUNDED = Within((1e-5, 1e-5), (1e-5, 1e-5), (1e-5, 1e-5))


def _layout(tensor: DTensor) -> tuple[object, ...]:
    mesh = tensor.device_mesh
    return mesh.mesh_dim_names, mesh.mesh.tolist(), tensor.placements, tensor.shape


def close(mine: Any, theirs: Any, name: str, within: tuple[float, float] = ROUNDED.loss) -> None:
    """Asserts that both are equal, naming what differs: parts of DTensors, or the whole of one and a plain tensor."""
    assert mine is not None, name
    assert theirs is not None, name
    mine, theirs = mine.detach(), theirs.detach()
    if isinstance(theirs, DTensor):
        assert _layout(mine) == _layout(theirs), name
        mine, theirs = local(mine), local(theirs)
    rtol, atol = within
    torch.testing.assert_close(whole(mine), theirs, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")


def compare_gradients(model: nn.Module, reference: nn.Module, within: tuple[float, float] = ROUNDED.gradient) -> None:
    """Asserts that both have the same gradients, and none for the same parameters."""
    for name, mine, theirs in both(model, reference):
        assert (mine.grad is None) == (theirs.grad is None), f"gradient of {name}: {mine.grad} against {theirs.grad}"
        if mine.grad is not None:
            assert isinstance(mine.grad, DTensor) == isinstance(mine, DTensor), name
            close(mine.grad, theirs.grad, f"gradient of {name}", within)


def compare_parameters(model: nn.Module, reference: nn.Module, within: tuple[float, float] = ROUNDED.parameter) -> None:
    """Asserts that both have the same values."""
    for name, mine, theirs in both(model, reference):
        assert mine.requires_grad == theirs.requires_grad, name
        close(mine, theirs, name, within)


def both(model: nn.Module, reference: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    theirs = dict(reference.named_parameters())
    assert list(dict(model.named_parameters())) == list(theirs)
    for name, mine in model.named_parameters():
        yield name, mine, theirs[name]


def can_be_split(tensor: torch.Tensor) -> bool:
    """What FSDP2 cannot split stays whole."""
    return bool(tensor.dim() and tensor.numel()) and (tensor.is_floating_point() or tensor.is_complex())


# What is run.


def _given(call: Any, otherwise: Any) -> Any:
    """What is called, whose truth is that of its length where `torch.compile` made it."""
    return otherwise if call is None else call


class Sides:
    """A model and its reference.

    Args:
        model: The one that is tested.
        reference: What it must equal.
        loss: Of a side.
        optimizer: Makes the optimizer of a side: now, or without one in `train`, as `default`.

    Attributes:
        call: What is called for the model: itself, or its compiled form.
        other: The same for the reference.
        optimizers: Of the two, one pair after the other.
        steps: How many batches were taken.
    """

    within: Within
    default: Make

    def __init__(self, model: Any, reference: Any, loss: Loss, optimizer: Make | None = None) -> None:
        self.model, self.reference, self.loss = model, reference, loss
        self.call, self.other = model, reference
        self.optimizers: list[tuple[torch.optim.Optimizer, ...]] = []
        self.steps = 0
        if optimizer is not None:
            self.optimize(optimizer)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.reference))

    def called(self) -> Iterator[tuple[Any, Any]]:
        """Each of the two models, with what is called for it."""
        return iter(((self.model, self.call), (self.reference, self.other)))

    def change(self, change: Callable[[Any], object]) -> None:
        """Does the same to both models."""
        for model in self:
            change(model)

    def optimize(self, make: Make | None = None) -> None:
        """Adds an optimizer over the parameters that each model has now."""
        mine, theirs = ((make or self.default)(list(model.parameters())) for model in self)
        self.optimizers.append((mine, theirs))

    def next_batch(self) -> tuple[Any, Any]:
        """What each side is called with."""
        raise NotImplementedError

    def losses(
        self, call: Any = None, other: Any = None, loss: Loss | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the next batch."""
        mine, theirs = self.next_batch()
        loss = loss or self.loss
        return loss(_given(call, self.call), mine), loss(_given(other, self.other), theirs)

    def backward(
        self, call: Any = None, other: Any = None, *, loss: Loss | None = None, within: Within | None = None
    ) -> None:
        """Forward and backward of both on the next batch, whose losses must agree."""
        mine, theirs = self.losses(call, other, loss)
        mine.backward()
        theirs.backward()
        self.compare_losses(mine, theirs, within)

    def accumulate(
        self,
        *calls: Any,
        other: Any = None,
        loss: Loss | None = None,
        within: Within | None = None,
        before: Callable[[Any, int], object] | None = None,
    ) -> None:
        """A step of `train` without its update."""
        for number, call in enumerate(calls or (self.call,)):
            is_last = number + 1 >= len(calls)
            for each in self:
                if before is not None:
                    before(each, number)
                elif len(calls) > 1:
                    each.set_requires_gradient_sync(is_last)
            self.backward(call, other, loss=loss, within=within)
            assert before or is_last or all(p.grad is None for p in self.model.parameters())
        self.compare_gradients(within)

    def update(self) -> None:
        """Steps and clears all optimizers."""
        for pair in self.optimizers:
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()

    def train(self, *calls: Any, steps: int = 2, within: Within | None = None, **how: Any) -> None:
        """Steps of both: losses, gradients and parameters must agree in each.

        Args:
            calls: What is called for the model; of several, each for a microbatch, of which the last one synchronizes.
            steps: How many.
            within: Another bound.
            how: `other`: what is called for the reference; `loss`: another one than that of both sides; `before`: is
                called with each model and the number of a microbatch, in the place of the synchronization.
        """
        if not self.optimizers:
            self.optimize()
        for _ in range(steps):
            self.accumulate(*calls, within=within, **how)
            self.update()
            self.compare_parameters(within)

    def zero_grad(self) -> None:
        self.change(lambda model: model.zero_grad())

    def compare_losses(self, mine: torch.Tensor, theirs: torch.Tensor, within: Within | None = None) -> None:
        close(mine, theirs, f"loss of batch {self.steps - 1}", (within or self.within).loss)

    def compare_gradients(self, within: Within | None = None) -> None:
        compare_gradients(self.model, self.reference, (within or self.within).gradient)

    def compare_parameters(self, within: Within | None = None) -> None:
        compare_parameters(self.model, self.reference, (within or self.within).parameter)

    def compare(self, within: Within | None = None) -> None:
        """Asserts that gradients and parameters agree."""
        self.compare_gradients(within)
        self.compare_parameters(within)


def made(make: Callable[[], Any]) -> Any:
    """A model of one seed on all ranks."""
    torch.manual_seed(0)
    return make()


class WithFsdp2(Sides):
    """A model that torch's FSDP2 has sharded, and another one, in eager code.

    Args:
        make: Makes a model.
        shard: Calls torch's `fully_shard`.
        batch: This rank's share of a step.
        loss: Of a side.
        ours: Shards the tested model otherwise.
        optimizer: Makes the optimizer of a side.
    """

    within = BITS
    default = staticmethod(adamw)

    def __init__(
        self,
        make: Callable[[], Any],
        shard: Callable[[Any], object],
        batch: Callable[[int], Any],
        loss: Loss = lambda call, batch: loss_of(call(batch)),
        *,
        ours: Callable[[Any], object] | None = None,
        optimizer: Make | None = None,
    ) -> None:
        model, reference = made(make), made(make)
        (ours or shard)(model)
        shard(reference)
        self.batch = batch
        super().__init__(model, reference, loss, optimizer)

    def compiled(self, *, fullgraph: bool = True, **options: Any) -> Any:
        """The model, compiled; that is what is called from now on."""
        self.call = compile_eagerly(self.model, fullgraph=fullgraph, **options)
        return self.call

    def next_batch(self) -> tuple[Any, Any]:
        """The same for both."""
        self.steps += 1
        batch = self.batch(self.steps - 1)
        return batch, batch


class Run(enum.Enum):
    """How a model is run beside one process."""

    PLAIN = "plain"
    """Compiled as it is, and sharded at its first call."""
    SHARDED = "sharded"
    """Sharded, then compiled."""
    EAGER = "eager"
    """Sharded, not compiled."""
    UNSHARDED = "unsharded"
    """Neither yet."""


class WithOneProcess(Sides):
    """A sharded model, and a copy of it that one process trains on the whole batch.

    Args:
        make: Makes the model.
        how: How it is run.
        shard: Shards it.
        loss: Of a side; averages over the batch.
        optimizer: Makes the optimizer of a side.
        shape: Of an element of a batch.
        rows: For each rank.
        twice: Whether each forward of the model is run twice, which must give the same.
        batch: Makes that of a step, instead of drawn numbers.
        reference: Instead of a copy.
        compiles: Further arguments of `compile_eagerly`.
    """

    within = ROUNDED
    default = staticmethod(sgd)

    def __init__(
        self,
        make: Callable[[], Any],
        how: Run = Run.SHARDED,
        shard: Callable[[Any], object] = fully_shard,
        loss: Loss = lambda call, batch: loss_of(call(batch)),
        *,
        optimizer: Make | None = None,
        shape: int | tuple[int, ...] = 6,
        rows: int = 2,
        twice: bool = True,
        batch: Callable[[int], Any] | None = None,
        reference: Any = None,
        **compiles: Any,
    ) -> None:
        model = made(make)
        reference = copy.deepcopy(model) if reference is None else reference
        if how in (Run.SHARDED, Run.EAGER):
            shard(model)
        super().__init__(model, reference, loss, optimizer)
        if how in (Run.SHARDED, Run.PLAIN):
            self.call = compile_eagerly(model, **compiles)
        self.shape = (shape,) if isinstance(shape, int) else shape
        self.dtype, self.rows, self.twice, self.batch = torch.float32, rows, twice, batch or self._drawn

    def next_batch(self) -> tuple[Any, Any]:
        """This rank's rows, and all."""
        self.steps += 1
        batch = self.batch(self.steps)
        return share(batch), batch

    def _drawn(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        world = dist.get_world_size() if dist.is_initialized() else 1
        return torch.randn(self.rows * world, *self.shape, generator=generator).to(self.dtype)

    def losses(
        self, call: Any = None, other: Any = None, loss: Loss | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the next batch; the model's own is of this rank's rows."""
        mine, theirs = self.next_batch()
        call, loss = _given(call, self.call), loss or self.loss
        first = loss(call, mine).detach() if self.twice else None
        found = loss(call, mine)
        assert first is None or torch.equal(first, found.detach()), "the second call read something else"
        return found, loss(_given(other, self.other), theirs)

    def compare_losses(self, mine: torch.Tensor, theirs: torch.Tensor, within: Within | None = None) -> None:
        """Asserts that the average over ranks is that of one process."""
        super().compare_losses(mean_over_ranks(mine), theirs, within)

    def compare_parameters(self, within: Within | None = None) -> None:
        """Asserts that they agree, and that those of the model are sharded."""
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter, DTensor) == can_be_split(parameter), name
        super().compare_parameters(within)
