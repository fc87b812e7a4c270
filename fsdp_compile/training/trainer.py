"""The training itself: a plain model, one line that shards and compiles it, AdamW, clipping."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile.comm.groups import mesh_of_shape
from fsdp_compile.sharding.fully_shard import fully_shard
from fsdp_compile.training.config import MixedPrecision, Schedule, TrainConfig
from fsdp_compile.training.data import Batches, Corpus
from fsdp_compile.training.model import Llama, ModelShape
from fsdp_compile.training.nonfinite import describe_nonfinite
from fsdp_compile.training.state_bytes import StateBytes, expected, measured
from fsdp_compile.training.world import World

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class StepResult:
    """What one step computed, still on the device: reading it waits for the step to end.

    Attributes:
        loss: This rank's mean loss in nats per byte, 0-d.
        grad_norm: Norm of all gradients before clipping, 0-d.
        nonfinite: What was not finite, the same text on all ranks, if nothing was updated because of that.
    """

    loss: Tensor
    grad_norm: Tensor
    nonfinite: str | None


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
        self.model = Llama(
            ModelShape(width=config.width, layers=config.layers, heads=config.heads, seq_len=config.seq_len)
        ).to(world.device)
        self.unsharded = expected(self.model, 1)
        self.sharded = expected(self.model, world.size // config.replicas)
        if shard_now or config.mixed_precision is MixedPrecision.BF16 or config.replicas > 1:
            fully_shard(self.model, mesh=_mesh(config, world), mp_policy=_precision(config))
        self.compiled = torch.compile(self.model, backend="fsdp")
        # A plain model is sharded at its first call; this optimizer gets the sharded parameters at its next step.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=BETAS, weight_decay=config.weight_decay)
        self.schedule = Schedule.of(config)
        self.batches = Batches(
            seed=config.seed,
            batch_size=config.batch_size,
            seq_len=config.seq_len,
            rank=world.rank,
            ranks=world.size,
        )

    def step(self, step: int) -> StepResult:
        """Train on one batch; the gradients stay until the next call.

        `step` is counted from 1 and decides the batch and the learning rate. Where the loss of a rank or a gradient is
        not finite, no rank updates anything.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(step)
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

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all ranks."""
        return self.config.batch_size * self.config.seq_len

    def state_bytes(self) -> StateBytes:
        """The bytes of this rank; to be called after a step."""
        return measured(self.optimizer)

    def _loss(self, blocks: Tensor, key: str | int) -> Tensor:
        tokens, targets = (half.to(self.world.device) for half in self.batches.draw(blocks, key))
        logits = self.compiled(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _mesh(config: TrainConfig, world: World) -> DeviceMesh | None:
    """Replicas of shards; `None` for shards over all ranks."""
    if config.replicas == 1:
        return None
    # Not torch's `init_device_mesh`, whose groups would wait 30 minutes, whatever `--timeout` says.
    return mesh_of_shape(world.device.type, (config.replicas, world.size // config.replicas))


def _precision(config: TrainConfig) -> MixedPrecisionPolicy:
    if config.mixed_precision is MixedPrecision.NONE:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
