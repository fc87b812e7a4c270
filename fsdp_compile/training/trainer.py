"""One training run on one rank: a plain model, one line that shards and compiles it, AdamW, and all around steps."""

from __future__ import annotations

import math
import resource
import time
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.fully_shard import state_of
from fsdp_compile.comm.groups import World, mesh_of_shape
from fsdp_compile.comm.placement import launcher_folder
from fsdp_compile.errors import ConfigError, FSDPCompileError, RankMismatchError
from fsdp_compile.explain.step_profile import profile_step
from fsdp_compile.sharding.fully_shard import fully_shard
from fsdp_compile.training import metrics
from fsdp_compile.training.checkpoint import Saves, load_checkpoint
from fsdp_compile.training.config import MixedPrecision, OnNonFinite
from fsdp_compile.training.data import Corpus, draw_batch, read_corpus
from fsdp_compile.training.job import METRICS, Job, lock_run
from fsdp_compile.training.metrics import Board, Display, Record
from fsdp_compile.training.model import Llama, ModelShape

BETAS = (0.9, 0.95)


def train(job: Job, world: World) -> None:
    """Run a job; every rank calls this. Rank 0 shows and writes.

    Raises:
        FSDPCompileError: Another process trains in the folder, a rank read other text than that which the run began
            with, a loss or a gradient is not finite, or a checkpoint cannot be written.
    """
    with ExitStack() as stack:
        if world.rank == 0:
            stack.enter_context(lock_run(job.folder))
        corpus = read_corpus(job.run.options.data, job.run.options.seq_len)
        for rank, fingerprint in enumerate(world.gather(corpus.fingerprint)):
            if fingerprint != job.run.text_fingerprint:
                what = f"rank {rank} read other text than that which the run began with"
                raise RankMismatchError(what, where=f"--data ({corpus.source})", instead="the same files on every host")
        display = stack.enter_context(metrics.open_display(job.run.options.steps, is_first=world.rank == 0))
        trainer = Trainer(job, corpus, world, display)
        stack.callback(trainer.saves.close)
        trainer.run()


class Trainer:
    """A model, its optimizer, its batches and its checkpoints on one rank. The corpus is the same on every rank."""

    def __init__(self, job: Job, corpus: Corpus, world: World, display: Display) -> None:
        self.job = job
        self.corpus = corpus
        self.world = world
        self.display = display
        self.start_s = time.perf_counter()
        self.paced_from = 0, self.start_s
        self.skipped_steps = 0
        self.said: set[str] = set()
        self.options = options = job.run.options
        replicas = f" ({options.replicas} replicas)" if options.replicas > 1 else ""
        display.say(f"{job.ranks} ranks{replicas} on {world.device.type}, run folder {job.folder}")
        display.say(f"text: {(corpus.train.nbytes + corpus.held_out.nbytes) / 1e6:.1f} MB, {corpus.source}")
        display.say("compiling, about a minute where Inductor's cache is cold ...")
        torch.manual_seed(options.seed)  # the same weights on every rank
        shape = ModelShape(width=options.width, layers=options.layers, heads=options.heads, seq_len=options.seq_len)
        self.model = Llama(shape).to(world.device)
        # Contents are compared when it is loaded, into parameters that are sharded now instead of at the first call.
        self.goes_on = world.gather(job.checkpoints.newest() is not None)[0]
        is_bf16 = options.mixed_precision is MixedPrecision.BF16
        if self.goes_on or is_bf16 or options.replicas > 1:
            # Not torch's `init_device_mesh`, whose groups would wait 30 minutes, whatever `--timeout` says.
            mesh_shape = (options.replicas, world.size // options.replicas)
            mesh = mesh_of_shape(world.device.type, mesh_shape) if options.replicas > 1 else None
            bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            fully_shard(self.model, mesh=mesh, mp_policy=bf16 if is_bf16 else MixedPrecisionPolicy())
        self.compiled = torch.compile(self.model, backend="fsdp")
        # A plain model is sharded at its first call; this optimizer gets the sharded parameters at its next step.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=BETAS, weight_decay=options.weight_decay)
        in_background = options.async_checkpoints
        self.saves = Saves(job.checkpoints, world, keep=options.keep_checkpoints, in_background=in_background)

    def run(self) -> None:
        """Train from the newest checkpoint, or the first step, to the last step."""
        options = self.options
        done_steps = self._begin()
        for step in range(done_steps + 1, options.steps + 1):
            profiles = options.profile and step == min(done_steps + 3, options.steps)  # two steps have compiled
            loss, norm = self._profile(step) if profiles else self.step(step)
            if step == done_steps + 1:
                self.paced_from = step, time.perf_counter()  # the first step compiled
            is_last = step == options.steps
            evaluates = is_last or step % options.eval_every == 0
            if evaluates or step % options.log_every == 0:
                self._measure(step, loss, norm, evaluates=evaluates)
            self._say_once(self.saves.poll())
            if is_last or step % options.checkpoint_every == 0:
                if self.optimizer.state:
                    self._say_once(self.saves.save(step, self.model, self.optimizer))
                else:
                    self.display.say(f"no checkpoint of step {step}: every step so far was skipped")
                self.paced_from = step, time.perf_counter()
        self._finish()

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Train on the batch of a step, counted from 1; where a loss or a gradient is not finite, no rank updates.

        Returns:
            This rank's mean loss in nats per byte and the norm of all gradients before clipping: 0-d, on the device, so
            that reading them waits for the step to end.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate_of(step)
            group["weight_decay"] = self.options.weight_decay  # a checkpoint has that of the run before
        self.optimizer.zero_grad()
        loss = self._loss(self.corpus.train, step)
        loss.backward()
        parameters = list(self.model.parameters())
        norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
        whole_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # Before clipping, which would spread what is not a number over all gradients.
        if self.world.any(~(loss.isfinite() & whole_norm.isfinite())):
            self._stop_or_skip(step, describe_nonfinite(self.model, loss, self.world))
        else:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.options.clip_norm, norm)
            self.optimizer.step()
        return loss.detach(), whole_norm

    def _profile(self, step: int) -> tuple[Tensor, Tensor]:
        """`step`, compared with its plan."""
        results: list[tuple[Tensor, Tensor]] = []
        try:
            profile = profile_step(self.compiled, lambda: results.append(self.step(step)))
        except ConfigError as error:
            self.display.say(f"step {step} is not profiled: {error}")
            return results[0] if results else self.step(step)
        self.display.say(str(profile))
        return results[0]

    @torch.no_grad()
    def held_out_loss(self) -> float | None:
        """The mean loss over all ranks, in nats per byte, on batches of held-out text that never change."""
        losses = [self._loss(self.corpus.held_out, f"held-out {i}") for i in range(self.options.eval_batches)]
        return _number(fmean(self.world.gather(torch.stack(losses).mean().item())))

    def _loss(self, blocks: Tensor, key: str | int) -> Tensor:
        drawn = draw_batch(self.options, blocks, key, rank=self.world.rank, ranks=self.world.size)
        tokens, targets = (half.to(self.world.device) for half in drawn)
        logits = self.compiled(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def _begin(self) -> int:
        """Load the newest checkpoint, if there is one; returns its steps."""
        job, say = self.job, self.display.say
        done_steps = 0
        if job.restart:
            say(f"restarted, {job.restart}")
        if self.goes_on:
            done_steps, skipped = load_checkpoint(job.checkpoints, self.model, self.optimizer, self.world)
            for problem in skipped:
                say(f"not loaded: {problem}")
            say(f"resumed after step {done_steps}")
        if self.world.rank == 0:
            if done_steps:
                job.checkpoints.set_aside_after(done_steps)
            if done_steps or job.restart:
                # A run that was killed may have recorded steps after its last checkpoint.
                metrics.drop_records_after(job.folder / METRICS, done_steps or -1)
            replace(job.run, launcher=launcher_folder()).write(job.folder)
            self.board = Board(job.folder / "tensorboard", done_steps)
        if not done_steps:
            self._record(Record(step=0, held_out_loss=self.held_out_loss(), time_s=self._time_s()))
        return done_steps

    def _stop_or_skip(self, step: int, what: str) -> None:
        if self.options.on_nonfinite is OnNonFinite.STOP:
            self._say_once(self.saves.wait())
            newest = self.job.checkpoints.newest()
            where = f"training; the last checkpoint is {newest}" if newest else "training"
            instead = "a lower --learning-rate, or --on-nonfinite skip"
            raise FSDPCompileError(f"step {step} updated nothing: {what}", where=where, instead=instead)
        self.skipped_steps += 1
        self.display.say(f"step {step} skipped: {what}")

    def _say_once(self, problems: tuple[str, ...]) -> None:
        for problem in problems:
            if problem not in self.said:  # each later save has it again
                self.said.add(problem)
                self.display.say(problem)

    def _measure(self, step: int, loss: Tensor, norm: Tensor, *, evaluates: bool) -> None:
        from_step, from_s = self.paced_from
        tokens = (step - from_step) * self.options.batch_size * self.options.seq_len
        losses, bytes_of_ranks = zip(*self.world.gather((loss.item(), _peak_bytes(self.world.device))), strict=True)
        record = Record(
            step=step,
            loss=_number(fmean(losses)),
            grad_norm=_number(norm.item()),
            lr=self.options.learning_rate_of(step),
            tokens_per_s=tokens / (time.perf_counter() - from_s) if tokens else None,
            held_out_loss=self.held_out_loss() if evaluates else None,
            memory_bytes=max(bytes_of_ranks),
            time_s=self._time_s(),
            skipped_steps=self.skipped_steps,
        )
        self._record(record)
        self.paced_from = step, time.perf_counter()

    def _record(self, record: Record) -> None:
        if self.world.rank == 0:
            metrics.append_record(self.job.folder / METRICS, record)
            self.board.add(record)
        self.display.update(record)

    def _finish(self) -> None:
        folder, say = self.job.folder, self.display.say
        self._say_once(self.saves.wait())
        if self.world.rank != 0:
            return
        records = metrics.read_records(folder / METRICS)
        if metrics.plot_records(records, plot := folder / "metrics.png"):
            say(f"curves: {plot}")
        else:
            say("no curves without matplotlib: pip install 'fsdp-compile[plot]'")
        say(metrics.summary(records, self.options.steps, self._time_s()))

    def _time_s(self) -> float:
        return round(time.perf_counter() - self.start_s, 3)


def describe_nonfinite(model: nn.Module, loss: Tensor, world: World) -> str:
    """One sentence on the losses and gradients of a step that are not finite; every rank calls this and gets the same.

    Gradients are averages over ranks by now, so that a rank with such a loss may not be one with such a gradient.
    """
    # Backward reaches what is registered last first, and takes what is not finite on from there.
    names = [name for name, _ in model.named_parameters()][::-1]
    gradients = [parameter.grad for parameter in model.parameters()][::-1]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    broken = [number for number, each in enumerate(local) if each is not None and not each.isfinite().all()]
    found = world.gather((loss.item(), broken[:1]))
    parts = [f"the loss of rank {rank} is {value}" for rank, (value, _) in enumerate(found) if not math.isfinite(value)]
    numbers = [number for _, first in found for number in first]
    if numbers:
        name = names[min(numbers)]
        ranks = ", ".join(str(rank) for rank, (_, first) in enumerate(found) if first == [min(numbers)])
        sharded = [path for path, module in model.named_modules() if path and state_of(module) is not None]
        unit = max((path for path in sharded if name.startswith(f"{path}.")), key=len, default="(root)")
        parts.append(f"the first gradient that is not finite is that of unit {unit}, {name}, in rows of rank {ranks}")
    else:
        parts.append("all gradients are finite, but not their norm" if not parts else "all gradients are finite")
    return "; ".join(parts)


def _peak_bytes(device: torch.device) -> int:
    """The most that this rank has had so far: of memory that torch allocates on a device, or resident on a CPU."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.get_device_module(device.type).max_memory_allocated(device)


def _number(value: float) -> float | None:
    """A value that JSON has, None for others."""
    return value if math.isfinite(value) else None
