"""One training run on one rank, from the first line it shows to the last."""

from __future__ import annotations

import math
import time

from fsdp_compile.errors import FSDPCompileError, RankMismatchError
from fsdp_compile.training.checkpoint import load_checkpoint
from fsdp_compile.training.config import OnNonFinite
from fsdp_compile.training.data import Corpus, read_corpus
from fsdp_compile.training.job import Job, Started, check_same_text
from fsdp_compile.training.metrics import (
    Display,
    Record,
    Silence,
    append_record,
    drop_records_after,
    held_out_losses,
    open_display,
    plot_losses,
    read_records,
)
from fsdp_compile.training.model import generate
from fsdp_compile.training.placement import launcher_folder
from fsdp_compile.training.run_lock import lock_run
from fsdp_compile.training.saves import BackgroundSaves, BlockingSaves, Saves
from fsdp_compile.training.state_bytes import StateBytes
from fsdp_compile.training.trainer import StepResult, Trainer
from fsdp_compile.training.world import World


def train(job: Job, world: World) -> None:
    """Run a job; every rank calls this. Rank 0 shows and writes.

    Raises:
        ConfigError: Another process trains in the run's folder, or the text has changed since the run began.
        RankMismatchError: Ranks read different text.
        FSDPCompileError: A loss or a gradient is not finite.
        CheckpointError: A checkpoint cannot be written.
    """
    if not world.is_first:
        _Run(job, world, _read_same_text(job, world), Silence()).run()
        return
    with lock_run(job.folder.path):
        corpus = _read_same_text(job, world)
        with open_display(job.config.steps) as display:
            _Run(job, world, corpus, display).run()


class Pace:
    """Tokens per second of training alone: `restart` follows everything else that a run does."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget everything so far."""
        self._tokens = 0
        self._start_s = time.perf_counter()

    def add(self, tokens: int) -> None:
        """Count tokens that were trained on."""
        self._tokens += tokens

    def tokens_per_s(self) -> float | None:
        """The pace since `restart`, None where nothing was counted."""
        return self._tokens / (time.perf_counter() - self._start_s) if self._tokens else None


class _Run:
    def __init__(self, job: Job, world: World, corpus: Corpus, display: Display) -> None:
        self.job = job
        self.world = world
        self.display = display
        self.pace = Pace()
        self.start_s = time.perf_counter()
        self.done_steps = 0
        self.skipped_steps = 0
        self.said: set[str] = set()
        self.trainer = Trainer(job.config, corpus, world, shard_now=job.done_steps > 0)
        kind = BackgroundSaves if job.config.async_checkpoints else BlockingSaves
        self.saves: Saves = kind(job.checkpoints, world, keep=job.config.keep_checkpoints)
        self._introduce(corpus)

    def run(self) -> None:
        try:
            self._train()
        finally:
            self.saves.close()

    def _train(self) -> None:
        self._begin()
        updated = False
        for step in range(self.done_steps + 1, self.job.config.steps + 1):
            result = self.trainer.step(step)
            self.pace.add(self.trainer.tokens_per_step)
            if result.nonfinite is not None:
                self._stop_or_skip(step, result.nonfinite)
            elif not updated:
                updated = True
                self._show_state_bytes()
            if step == self.done_steps + 1:
                self.pace.restart()  # the first step compiled
            self._after_step(step, result)
        self._finish()

    def _introduce(self, corpus: Corpus) -> None:
        job, trainer = self.job, self.trainer
        say = self.display.say
        replicas = f" ({job.config.replicas} replicas)" if job.config.replicas > 1 else ""
        say(f"{job.ranks} ranks{replicas} on {self.world.device.type}, run folder {job.folder.path}")
        say(f"text: {corpus.size_bytes / 1e6:.1f} MB, {corpus.source}")
        say(f"each rank will hold {compare_bytes(trainer.sharded, trainer.unsharded)}")
        say("compiling, about a minute where Inductor's cache is cold ...")

    def _begin(self) -> None:
        job = self.job
        started = Started(job.config, job.fingerprint, job.run, str(launcher_folder() or ""))
        if job.restart:
            self.display.say(f"restarted, {job.restart}")
        if job.done_steps:
            self._load()
            if self.world.is_first:
                # A run that was killed may have recorded steps after its last checkpoint.
                drop_records_after(job.folder.metrics, self.done_steps)
                job.folder.write_config(started)
            return
        if self.world.is_first:
            if job.restart:
                drop_records_after(job.folder.metrics, -1)
            job.folder.write_config(started)
        self._record(Record(step=0, held_out_loss=self.trainer.held_out_loss(), time_s=self._time_s()))

    def _load(self) -> None:
        checkpoints = self.job.checkpoints
        loaded = load_checkpoint(checkpoints, self.trainer.model, self.trainer.optimizer, self.world)
        self.done_steps = loaded.step
        if self.world.is_first:
            checkpoints.set_aside_after(loaded.step)
        for problem in loaded.skipped:
            self.display.say(f"not loaded: {problem}")
        self.display.say(f"resumed after step {loaded.step}")

    def _stop_or_skip(self, step: int, what: str) -> None:
        if self.job.config.on_nonfinite is OnNonFinite.STOP:
            self._say_once(self.saves.wait())
            newest = self.job.checkpoints.newest()
            raise FSDPCompileError(
                f"step {step} updated nothing: {what}",
                where=f"training; the last checkpoint is {newest}" if newest else "training",
                instead="a lower --learning-rate, or --on-nonfinite skip",
            )
        self.skipped_steps += 1
        self.display.say(f"step {step} skipped: {what}")

    def _after_step(self, step: int, result: StepResult) -> None:
        config = self.job.config
        is_last = step == config.steps
        evaluates = is_last or step % config.eval_every == 0
        if evaluates or step % config.log_every == 0:
            self._measure(step, result, evaluates=evaluates)
        self._say_once(self.saves.poll())
        if is_last or step % config.checkpoint_every == 0:
            self._save(step)
            self.pace.restart()

    def _save(self, step: int) -> None:
        trainer = self.trainer
        if not trainer.optimizer.state:
            self.display.say(f"no checkpoint of step {step}: every step so far was skipped")
            return
        self._say_once(self.saves.save(step, trainer.model, trainer.optimizer))

    def _say_once(self, problems: tuple[str, ...]) -> None:
        for problem in problems:
            if problem not in self.said:  # each later save has it again
                self.said.add(problem)
                self.display.say(problem)

    def _measure(self, step: int, result: StepResult, *, evaluates: bool) -> None:
        record = Record(
            step=step,
            loss=_number(self.world.mean(result.loss)),
            grad_norm=_number(result.grad_norm.item()),
            lr=self.trainer.schedule(step),
            tokens_per_s=self.pace.tokens_per_s(),
            held_out_loss=_number(self.trainer.held_out_loss()) if evaluates else None,
            time_s=self._time_s(),
            skipped_steps=self.skipped_steps,
        )
        self._record(record)
        self.pace.restart()

    def _record(self, record: Record) -> None:
        if self.world.is_first:
            append_record(self.job.folder.metrics, record)
        self.display.update(record)

    def _show_state_bytes(self) -> None:
        held = max(self.world.gather(self.trainer.state_bytes()), key=lambda each: each.total)
        self.display.say(f"measured: a rank holds {compare_bytes(held, self.trainer.unsharded)}")

    def _finish(self) -> None:
        config, folder, say = self.job.config, self.job.folder, self.display.say
        # On every rank, since each byte gathers parameters.
        text = generate(
            self.trainer.model,
            config.prompt,
            size_bytes=config.sample_bytes,
            seq_len=config.seq_len,
            temperature=config.temperature,
            seed=config.seed,
            device=self.world.device,
        )
        self._say_once(self.saves.wait())
        if not self.world.is_first:
            return
        if config.sample_bytes:
            folder.sample.write_text(text, encoding="utf-8")
            say(f"---- sample, {folder.sample} ----\n{text}\n----")
        records = read_records(folder.metrics)
        if plot_losses(records, folder.plot):
            say(f"loss curve: {folder.plot}")
        else:
            say("no loss curve without matplotlib: pip install 'fsdp-compile[plot]'")
        say(_summary(records, config.steps, self._time_s()))

    def _time_s(self) -> float:
        return round(time.perf_counter() - self.start_s, 3)


def compare_bytes(held: StateBytes, unsharded: StateBytes) -> str:
    """One line: the bytes of a rank and of an unsharded one, in megabytes (10^6 bytes)."""
    parts = (
        f"{name} {mine / 1e6:.2f} of {whole / 1e6:.2f} MB"
        for name, mine, whole in (
            ("parameters", held.parameters, unsharded.parameters),
            ("gradients", held.gradients, unsharded.gradients),
            ("AdamW state", held.optimizer, unsharded.optimizer),
            ("together", held.total, unsharded.total),
        )
    )
    return ", ".join(parts)


def _read_same_text(job: Job, world: World) -> Corpus:
    corpus = read_corpus(job.config.data, job.config.seq_len)
    fingerprints = world.gather(corpus.fingerprint)
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise RankMismatchError(
                f"rank {rank} read other text than rank 0",
                where=f"--data ({corpus.source})",
                instead="the same files on every host",
            )
    check_same_text(corpus.fingerprint, job.fingerprint)
    return corpus


def _number(value: float) -> float | None:
    """A value that JSON has, None for others."""
    return value if math.isfinite(value) else None


def _summary(records: list[Record], steps: int, time_s: float) -> str:
    before, after = held_out_losses(records)[0][1], records[-1].held_out_loss
    if after is None:  # it would be that of an earlier step
        return f"held-out loss {before:.3f} -> not finite after {steps} steps, {time_s:.0f} s"
    bits = 1 / math.log(2)
    return (
        f"held-out loss {before:.3f} -> {after:.3f} nats per byte "
        f"({before * bits:.2f} -> {after * bits:.2f} bits) after {steps} steps, {time_s:.0f} s"
    )
