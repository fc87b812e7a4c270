"""The training itself: a plain model, one line that shards and compiles it, AdamW, clipping; what is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.fully_shard import state_of
from fsdp_compile.comm.groups import mesh_of_shape
from fsdp_compile.sharding.fully_shard import fully_shard
from fsdp_compile.training.config import MixedPrecision, TrainConfig
from fsdp_compile.training.data import Corpus, draw_batch
from fsdp_compile.training.model import Llama, ModelShape
from fsdp_compile.training.world import World

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class StepResult:
    """What one step computed, still on the device: reading it waits for the step to end."""

    loss: Tensor
    """This rank's mean loss in nats per byte, 0-d."""
    grad_norm: Tensor
    """Norm of all gradients before clipping, 0-d."""
    nonfinite: str | None
    """What was not finite, the same text on all ranks, if nothing was updated because of that."""


class Trainer:
    """A model, its optimizer and its batches on one rank.

    The corpus is the same on every rank. `shard_now` shards when constructed, as loading a checkpoint needs, instead of
    at the first call.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, world: World, *, shard_now: bool) -> None:
        self.config = config
        self.corpus = corpus
        self.world = world
        torch.manual_seed(config.seed)  # the same weights on every rank
        shape = ModelShape(width=config.width, layers=config.layers, heads=config.heads, seq_len=config.seq_len)
        self.model = Llama(shape).to(world.device)
        if shard_now or config.mixed_precision is MixedPrecision.BF16 or config.replicas > 1:
            # Not torch's `init_device_mesh`, whose groups would wait 30 minutes, whatever `--timeout` says.
            mesh_shape = (config.replicas, world.size // config.replicas)
            mesh = mesh_of_shape(world.device.type, mesh_shape) if config.replicas > 1 else None
            is_bf16 = config.mixed_precision is MixedPrecision.BF16
            bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            fully_shard(self.model, mesh=mesh, mp_policy=bf16 if is_bf16 else MixedPrecisionPolicy())
        self.compiled = torch.compile(self.model, backend="fsdp")
        # A plain model is sharded at its first call; this optimizer gets the sharded parameters at its next step.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=BETAS, weight_decay=config.weight_decay)

    def step(self, step: int) -> StepResult:
        """Train on one batch; the gradients stay until the next call.

        `step` is counted from 1 and decides the batch and the learning rate. Where the loss of a rank or a gradient is
        not finite, no rank updates anything.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_of(step)
            group["weight_decay"] = self.config.weight_decay  # a checkpoint has that of the run before
        self.optimizer.zero_grad()
        loss = self._loss(self.corpus.train, step)
        loss.backward()
        parameters = list(self.model.parameters())
        norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
        whole_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # Before clipping, which would spread what is not a number over all gradients.
        if self.world.any(~(loss.isfinite() & whole_norm.isfinite())):
            return StepResult(loss.detach(), whole_norm, describe_nonfinite(self.model, loss, self.world))
        torch.nn.utils.clip_grads_with_norm_(parameters, self.config.clip_norm, norm)
        self.optimizer.step()
        return StepResult(loss.detach(), whole_norm, None)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The mean loss over all ranks, in nats per byte, on batches of held-out text that never change."""
        losses = [self._loss(self.corpus.held_out, f"held-out {i}") for i in range(self.config.eval_batches)]
        return self.world.mean(torch.stack(losses).mean())

    def _loss(self, blocks: Tensor, key: str | int) -> Tensor:
        drawn = draw_batch(self.config, blocks, key, rank=self.world.rank, ranks=self.world.size)
        tokens, targets = (half.to(self.world.device) for half in drawn)
        logits = self.compiled(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def describe_nonfinite(model: nn.Module, loss: Tensor, world: World) -> str:
    """One sentence on the losses and gradients of a step that are not finite; every rank calls this and gets the same.

    Gradients are averages over ranks by now, so that a rank with such a loss may not be one with such a gradient.
    """
    # Backward reaches what is registered last first, and takes what is not finite on from there.
    parameters = list(model.named_parameters())[::-1]
    broken = [number for number, (_, each) in enumerate(parameters) if not _is_finite(each.grad)]
    found = world.gather((loss.item(), broken[:1]))
    parts = [f"the loss of rank {rank} is {value}" for rank, (value, _) in enumerate(found) if not math.isfinite(value)]
    numbers = [number for _, first in found for number in first]
    if numbers:
        name, _ = parameters[min(numbers)]
        ranks = ", ".join(str(rank) for rank, (_, first) in enumerate(found) if first == [min(numbers)])
        sharded = [path for path, module in model.named_modules() if path and state_of(module) is not None]
        unit = max((path for path in sharded if name.startswith(f"{path}.")), key=len, default="(root)")
        parts.append(f"the first gradient that is not finite is that of unit {unit}, {name}, in rows of rank {ranks}")
    else:
        parts.append("all gradients are finite, but not their norm" if not parts else "all gradients are finite")
    return "; ".join(parts)


def _is_finite(gradient: Tensor | None) -> bool:
    if gradient is None:
        return True
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool(torch.isfinite(local).all())
