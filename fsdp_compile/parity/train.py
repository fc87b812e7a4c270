"""Trains both sides step by step, on every rank, and compares them after each step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_compile._torch.fully_shard import policy_of, state_of
from fsdp_compile.parity.compare import Difference, Extent, Quantity, compare, depth_of, magnitude
from fsdp_compile.parity.experiment import Accumulation, Experiment, Level, split
from fsdp_compile.parity.sides import Side, Tensors, compiled_side, reference_side, unit_names

LOSS = (Quantity.LOSS, "loss")


class _Judge:
    """Compares tensors of rank 0 and gives each difference its bound."""

    def __init__(self, experiment: Experiment, compiled: Side, reference: Side, batch: Any, depth: int) -> None:
        # Without an extent every bit has to agree.
        is_bitwise = experiment.level is Level.BITWISE
        self.extent = None if is_bitwise else _extent(experiment, compiled, reference, batch, depth)
        self.linear = isinstance(reference.optimizer, torch.optim.SGD)
        self.moved: dict[str, float] = {}
        """Largest change of each parameter so far, weighted by the relative bound of each step."""

    def gradients(self, step: int, ours: Tensors, theirs: Tensors) -> Iterator[Difference]:
        """Losses and gradients of a step."""
        gradients = [value for (quantity, _), value in theirs.items() if quantity is Quantity.GRADIENT]
        largest = max(map(magnitude, gradients), default=0.0)
        for key in {**ours, **theirs}:
            bound = 0.0
            if self.extent is not None:
                bound = magnitude(theirs.get(key)) * self.extent.path(step)
                bound += 0.0 if key == LOSS else largest * self.extent.sum()
            yield dataclasses.replace(compare(*key, step, ours.get(key), theirs.get(key)), bound=bound)

    def after_step(self, step: int, before: Tensors, ours: Tensors, theirs: Tensors) -> Iterator[Difference]:
        """Parameters, optimizer state and buffers after a step; `before` are the reference's before it."""
        states = any(quantity is Quantity.STATE for quantity, _ in theirs)
        for key in {**ours, **theirs}:
            if states or key[0] is not Quantity.STATE:
                found = compare(*key, step, ours.get(key), theirs.get(key))
                yield dataclasses.replace(found, bound=self._bound(step, key, before.get(key), theirs.get(key)))

    def _bound(
        self, step: int, key: tuple[Quantity, str], before: torch.Tensor | None, now: torch.Tensor | None
    ) -> float:
        if self.extent is None:
            return 0.0
        quantity, name = key
        error = self.extent.path(step) + self.extent.sum()
        if quantity is Quantity.PARAMETER and now is not None:
            way = magnitude(now if before is None else now - before)
            # An optimizer that divides gradients by their size may take the full step in either direction: twice
            # its length apart.
            self.moved[name] = self.moved.get(name, 0.0) + way * (error if self.linear else 2.0)
            return self.moved[name] + magnitude(now) * self.extent.sum()
        if quantity is Quantity.STATE and self.linear:
            return magnitude(now) * error * (step + 1)
        # Reported, not compared: no bound follows for the state of such an optimizer, or for buffers.
        return math.inf


def train_both(experiment: Experiment) -> list[Difference]:
    """Trains both sides; to be called on every rank.

    Returns:
        On rank 0 one difference per tensor and step, in the order in which a step makes them; elsewhere nothing.
    """
    ours = compiled_side(experiment)
    theirs = reference_side(experiment, unit_names(ours.model))
    judge: _Judge | None = None
    found: list[Difference] = []
    for step in range(experiment.steps):
        torch.manual_seed(experiment.seed + step)  # a batch that is drawn is the same one on each rank
        made = experiment.make_batch(step)
        batch = tree_map_only(
            torch.Tensor,
            lambda tensor: tensor.to(experiment.device_type),
            dict(made) if isinstance(made, Mapping) else made,  # pytrees know mappings of torch's and Python's alone
        )
        our_losses = _all_losses(_backward(experiment, ours, batch, step)[0])
        our_gradients = ours.gradients()
        our_state = _step(ours)
        if theirs is None:
            continue
        their_losses, depth = _backward(experiment, theirs, batch, step)
        if theirs.whole_batch:
            # One process has one loss for the batch, the mean of those of all ranks.
            our_losses = our_losses.mean().reshape(1)
        else:
            their_losses = _all_losses(their_losses)
        their_gradients = theirs.gradients()
        # Cloned: the optimizer updates parameters in place.
        before = {key: None if v is None else v.clone() for key, v in theirs.state().items()}
        their_state = _step(theirs)
        if dist.get_rank() == 0:
            judge = judge or _Judge(experiment, ours, theirs, batch, depth)
            found.extend(
                judge.gradients(step, {LOSS: our_losses, **our_gradients}, {LOSS: their_losses, **their_gradients})
            )
            found.extend(judge.after_step(step, before, our_state, their_state))
    return found


def first_stop_that_differs(experiments: Mapping[str, Experiment]) -> str | None:
    """Trains one experiment after the other until one exceeds its level; to be called on every rank.

    Returns:
        Its key, or `None`.
    """
    for name, experiment in experiments.items():
        # Else the next experiment would run the graphs of the one before.
        torch.compiler.reset()
        exceeds = [any(difference.exceeds for difference in train_both(experiment))]
        dist.broadcast_object_list(exceeds)  # only the first rank has compared
        if exceeds[0]:
            return name
    return None


def _step(side: Side) -> Tensors:
    """Makes one optimizer step."""
    side.optimizer.step()
    side.optimizer.zero_grad(set_to_none=True)
    return side.state()


def _backward(experiment: Experiment, side: Side, batch: Any, step: int) -> tuple[torch.Tensor, int]:
    """Forward and backward of every micro-batch of this rank, or of the whole batch at once.

    Returns:
        Losses `[micro-batches]`, and the depth of the first.
    """
    rank, micro = dist.get_rank(), experiment.micro_batches
    shares = [batch] if side.whole_batch else split(split(batch, experiment.world_size)[rank], micro)
    losses, depth = [], 0
    for index, share in enumerate(shares):
        # Dropout draws the same numbers on both sides.
        torch.manual_seed(experiment.seed + 1 + (step * experiment.world_size + rank) * micro + index)
        held = experiment.accumulation is Accumulation.HOLD and index + 1 < len(shares)
        with side.holding() if held else contextlib.nullcontext():
            loss = experiment.loss(side.model, share)
            depth = depth or depth_of(loss)
            (loss / len(shares)).backward()
        losses.append(loss.detach())
    return torch.stack(losses), depth


def _extent(experiment: Experiment, compiled: Side, reference: Side, batch: Any, depth: int) -> Extent:
    """What the bounds of a run depend on, from its models and its first batch."""
    given = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    tensors = [*reference.named.values(), *given]
    longest = max((max(p.shape, default=1) for p in reference.named.values()), default=1)
    states = [state for module in compiled.given.modules() if (state := state_of(module)) is not None]
    policies = [policy_of(state) for state in states]
    narrow = [dtype for policy in policies for dtype in (policy.param_dtype, policy.reduce_dtype)]
    numbers = [t.dtype.to_real() for t in tensors if t.is_floating_point() or t.is_complex()]
    dtypes = [*(dtype for dtype in narrow if dtype is not None), *numbers]
    # A product of complex numbers adds up two products of numbers for each of its parts.
    terms = 2 if any(t.is_complex() for t in tensors) else 1
    return Extent(
        depth=max(1, depth),
        length=terms * max([longest, *(t.numel() for t in given)]),
        elements=terms * 4 * experiment.steps * sum(p.numel() for p in reference.named.values()),
        dtype=max(dtypes or [torch.float32], key=lambda dtype: torch.finfo(dtype).eps),
    )


def _all_losses(losses: torch.Tensor) -> torch.Tensor:
    """`[ranks, micro-batches]`."""
    gathered = [torch.empty_like(losses) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, losses)
    return torch.stack(gathered)
