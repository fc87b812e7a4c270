"""One training run on one rank, from the first line it shows to the last."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import replace

import torch

from fsdp_compile.errors import FSDPCompileError, RankMismatchError
from fsdp_compile.training.checkpoint import SaveMode, Saves, load_checkpoint
from fsdp_compile.training.config import OnNonFinite
from fsdp_compile.training.data import Corpus, read_corpus
from fsdp_compile.training.job import METRICS, Job, lock_run
from fsdp_compile.training.metrics import (
    Display,
    Record,
    append_record,
    drop_records_after,
    open_display,
    plot_losses,
    read_records,
    summary,
)
from fsdp_compile.training.model import generate
from fsdp_compile.training.placement import launcher_folder
from fsdp_compile.training.trainer import StepResult, Trainer
from fsdp_compile.training.world import World


def train(job: Job, world: World) -> None:
    """Run a job; every rank calls this. Rank 0 shows and writes.

    Raises:
        ConfigError: Another process trains in the run's folder.
        RankMismatchError: A rank read other text than that which the run began with.
        FSDPCompileError: A loss or a gradient is not finite.
        CheckpointError: A checkpoint cannot be written.
    """
    with ExitStack() as stack:
        if world.is_first:
            stack.enter_context(lock_run(job.folder))
        corpus = _read_same_text(job, world)
        display = stack.enter_context(open_display(job.run.options.steps, is_first=world.is_first))
        run = _Run(job, world, corpus, display)
        stack.callback(run.saves.close)
        run.run()


class _Run:
    def __init__(self, job: Job, world: World, corpus: Corpus, display: Display) -> None:
        options = job.run.options
        self.job = job
        self.options = options
        self.world = world
        self.display = display
        self.start_s = time.perf_counter()
        self.paced_from = 0, self.start_s
        self.skipped_steps = 0
        self.said: set[str] = set()
        replicas = f" ({options.replicas} replicas)" if options.replicas > 1 else ""
        display.say(f"{job.ranks} ranks{replicas} on {world.device.type}, run folder {job.folder}")
        display.say(f"text: {corpus.size_bytes / 1e6:.1f} MB, {corpus.source}")
        display.say("compiling, about a minute where Inductor's cache is cold ...")
        # Of a new run there is none. Contents are compared when it is loaded.
        self.goes_on = world.any(torch.tensor(job.checkpoints.newest() is not None, device=world.device))
        self.trainer = Trainer(options, corpus, world, shard_now=self.goes_on)
        mode = SaveMode.BACKGROUND if options.async_checkpoints else SaveMode.WAIT
        self.saves = Saves(job.checkpoints, world, keep=options.keep_checkpoints, mode=mode)

    def run(self) -> None:
        options = self.options
        done_steps = self._begin()
        for step in range(done_steps + 1, options.steps + 1):
            result = self.trainer.step(step)
            if result.nonfinite is not None:
                self._stop_or_skip(step, result.nonfinite)
            if step == done_steps + 1:
                self._restart_pace(step)  # the first step compiled
            is_last = step == options.steps
            evaluates = is_last or step % options.eval_every == 0
            if evaluates or step % options.log_every == 0:
                self._measure(step, result, evaluates=evaluates)
            self._say_once(self.saves.poll())
            if is_last or step % options.checkpoint_every == 0:
                self._save(step)
        self._finish()

    def _begin(self) -> int:
        """Load the newest checkpoint, if there is to be one; returns its steps."""
        job, say = self.job, self.display.say
        done_steps = 0
        if job.restart:
            say(f"restarted, {job.restart}")
        if self.goes_on:
            state = self.trainer.model, self.trainer.optimizer
            done_steps, skipped = load_checkpoint(job.checkpoints, *state, self.world)
            for problem in skipped:
                say(f"not loaded: {problem}")
            say(f"resumed after step {done_steps}")
        if self.world.is_first:
            if done_steps:
                job.checkpoints.set_aside_after(done_steps)
            if done_steps or job.restart:
                # A run that was killed may have recorded steps after its last checkpoint.
                drop_records_after(job.folder / METRICS, done_steps or -1)
            replace(job.run, launcher=launcher_folder()).write(job.folder)
        if not done_steps:
            self._record(Record(step=0, held_out_loss=self.trainer.held_out_loss(), time_s=self._time_s()))
        return done_steps

    def _stop_or_skip(self, step: int, what: str) -> None:
        if self.options.on_nonfinite is OnNonFinite.STOP:
            self._say_once(self.saves.wait())
            newest = self.job.checkpoints.newest()
            raise FSDPCompileError(
                f"step {step} updated nothing: {what}",
                where=f"training; the last checkpoint is {newest}" if newest else "training",
                instead="a lower --learning-rate, or --on-nonfinite skip",
            )
        self.skipped_steps += 1
        self.display.say(f"step {step} skipped: {what}")

    def _save(self, step: int) -> None:
        if self.trainer.optimizer.state:
            self._say_once(self.saves.save(step, self.trainer.model, self.trainer.optimizer))
        else:
            self.display.say(f"no checkpoint of step {step}: every step so far was skipped")
        self._restart_pace(step)

    def _say_once(self, problems: tuple[str, ...]) -> None:
        for problem in problems:
            if problem not in self.said:  # each later save has it again
                self.said.add(problem)
                self.display.say(problem)

    def _measure(self, step: int, result: StepResult, *, evaluates: bool) -> None:
        from_step, from_s = self.paced_from
        tokens = (step - from_step) * self.options.batch_size * self.options.seq_len
        record = Record(
            step=step,
            loss=_number(self.world.mean(result.loss)),
            grad_norm=_number(result.grad_norm.item()),
            lr=self.options.learning_rate_of(step),
            tokens_per_s=tokens / (time.perf_counter() - from_s) if tokens else None,
            held_out_loss=_number(self.trainer.held_out_loss()) if evaluates else None,
            time_s=self._time_s(),
            skipped_steps=self.skipped_steps,
        )
        self._record(record)
        self._restart_pace(step)

    def _restart_pace(self, step: int) -> None:
        """Count tokens per second from here: of training, and of nothing else that a run does."""
        self.paced_from = step, time.perf_counter()

    def _record(self, record: Record) -> None:
        if self.world.is_first:
            append_record(self.job.folder / METRICS, record)
        self.display.update(record)

    def _finish(self) -> None:
        folder, say = self.job.folder, self.display.say
        # On every rank, since each byte gathers parameters.
        text = generate(self.trainer.model, self.options, self.world.device)
        self._say_once(self.saves.wait())
        if not self.world.is_first:
            return
        if self.options.sample_bytes:
            sample = folder / "sample.txt"
            sample.write_text(text, encoding="utf-8")
            say(f"---- sample, {sample} ----\n{text}\n----")
        records = read_records(folder / METRICS)
        if plot_losses(records, plot := folder / "loss.png"):
            say(f"loss curve: {plot}")
        else:
            say("no loss curve without matplotlib: pip install 'fsdp-compile[plot]'")
        say(summary(records, self.options.steps, self._time_s()))

    def _time_s(self) -> float:
        return round(time.perf_counter() - self.start_s, 3)


def _read_same_text(job: Job, world: World) -> Corpus:
    corpus = read_corpus(job.run.options.data, job.run.options.seq_len)
    for rank, fingerprint in enumerate(world.gather(corpus.fingerprint)):
        if fingerprint != job.run.text_fingerprint:
            what = f"rank {rank} read other text than that which the run began with"
            raise RankMismatchError(what, where=f"--data ({corpus.source})", instead="the same files on every host")
    return corpus


def _number(value: float) -> float | None:
    """A value that JSON has, None for others."""
    return value if math.isfinite(value) else None
