"""One run: what it trains, its folder and files, on how many ranks, new or resumed."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fsdp_compile.errors import ConfigError
from fsdp_compile.training.checkpoint_folder import Check, CheckpointFolder, step_of
from fsdp_compile.training.config import TrainConfig
from fsdp_compile.training.placement import TIMEOUT_S, DeviceKind, Placement

RUNS = Path("runs")
SHORTEST_TIMEOUT_S = 1e-3
"""Torch counts milliseconds."""
LONGEST_TIMEOUT_S = 1e8
"""About three years: torch's clocks overflow at some hundred."""


@dataclass(frozen=True)
class Started:
    """What a run was started with.

    Attributes:
        fingerprint: A hash of the text.
        run: What tells the run from others.
        launcher: What tells the elastic launcher that started its ranks from others; "" where nothing does.
    """

    config: TrainConfig
    fingerprint: str
    run: str
    launcher: str = ""


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """What was trained on what, JSON."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line: see `metrics.Record`."""
        return self.path / "metrics.jsonl"

    @property
    def plot(self) -> Path:
        """The loss curve, PNG."""
        return self.path / "loss.png"

    @property
    def sample(self) -> Path:
        """Text that the model wrote at the end."""
        return self.path / "sample.txt"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    def write_config(self, started: Started) -> None:
        """Make the folder and write what `read_config` reads."""
        self.path.mkdir(parents=True, exist_ok=True)
        written = {
            "options": started.config.to_dict(),
            "text_fingerprint": started.fingerprint,
            "run": started.run,
            "launcher": started.launcher,
        }
        aside = self.config.with_suffix(".partial")  # a resumed run that is interrupted here can be resumed again
        aside.write_text(json.dumps(written, indent=2) + "\n")
        aside.replace(self.config)

    def read_config(self) -> Started:
        """What the run in this folder was started with.

        Raises:
            ConfigError: No run was started here, or the file is damaged.
        """
        if not self.config.is_file():
            raise ConfigError(f"there is no run in {self.path}", where="--resume", instead="the --out folder of a run")
        try:
            written: dict[str, Any] = json.loads(self.config.read_text())
            if "options" in written and "run" not in written:
                raise _of_an_earlier_version(self)
            return Started(
                TrainConfig.from_dict(written["options"]),
                written["text_fingerprint"],
                written["run"],
                written.get("launcher", ""),  # earlier versions did not write it
            )
        except OSError as error:
            raise ConfigError(f"cannot read {self.config}: {error.strerror}", where="--resume") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{self.config} is damaged: {error}", where="--resume", instead="a new run") from error


def _of_an_earlier_version(folder: RunFolder) -> ConfigError:
    return ConfigError(
        f"the run in {folder.path} was started by an earlier version of fsdp_compile, whose checkpoints say neither "
        "which run wrote them nor what must be in their files",
        where="--resume",
        instead=f"a new run, or that version; torch.distributed.checkpoint reads {folder.checkpoints} as well",
    )


def new_folder(out: Path | None, restarted_by: str = "") -> RunFolder:
    """The folder of a new run; without `out`, one below `RUNS` named after the time.

    Only ranks that a launcher has started again, `restarted_by`, may find a run there: the one that it began.

    Raises:
        ConfigError: A run was started there before, or there is a file instead of a folder.
    """
    folder = RunFolder(out or RUNS / datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S"))
    for path in (folder.path, *folder.path.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file", where="--out", instead="a folder, or a path that is free")
    if folder.config.exists() and not (restarted_by and folder.read_config().launcher == restarted_by):
        raise ConfigError(
            f"there is a run in {folder.path} already",
            where="--out",
            instead=f"another folder, or --resume {folder.path}",
        )
    return folder


def newest_folder() -> RunFolder:
    """The run below `RUNS` that was started or resumed last, whatever its name.

    Raises:
        ConfigError: There is none.
    """
    configs = sorted(RUNS.glob("*/config.json"), key=lambda config: (config.stat().st_mtime_ns, config.parent.name))
    if not configs:
        raise ConfigError(f"there is no run to resume below {RUNS}", where="--resume", instead="--resume FOLDER")
    return RunFolder(configs[-1].parent)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run whose options were all checked, before anything is started for it.

    Attributes:
        run: What tells the run from others.
        fingerprint: A hash of the text that it began with.
        done_steps: Steps of the newest checkpoint that is complete as far as names and sizes tell; 0 for a new run.
        ranks: Number of ranks on all hosts.
        timeout_s: How long a rank waits for others before all of them end.
        restart: Which one this is of how many, and why; "" the first time.

    Raises:
        ConfigError: The timeout is out of bounds.
    """

    config: TrainConfig
    folder: RunFolder
    run: str
    fingerprint: str
    done_steps: int
    ranks: int
    device: DeviceKind
    timeout_s: float = TIMEOUT_S
    restart: str = ""

    def __post_init__(self) -> None:
        if not SHORTEST_TIMEOUT_S <= self.timeout_s <= LONGEST_TIMEOUT_S:  # also not for NaN
            raise ConfigError(
                f"{self.timeout_s:g} is out of bounds",
                where="--timeout",
                instead=f"seconds, a number from {SHORTEST_TIMEOUT_S:g} to {LONGEST_TIMEOUT_S:g}",
            )

    @property
    def checkpoints(self) -> CheckpointFolder:
        """The checkpoints of the run."""
        return CheckpointFolder(self.folder.checkpoints, self.run)

    def restarted(self, restart: str) -> Job:
        """The same after a launcher has started the ranks again: from the last checkpoint, or from the first step."""
        newest = self.checkpoints.newest()  # whose contents are compared when it is loaded
        return replace(self, done_steps=0 if newest is None else step_of(newest) or 0, restart=restart)


def check_same_text(fingerprint: str, begun_with: str) -> None:
    """Refuses to go on with another text than that which a run began with, given hashes of both.

    Raises:
        ConfigError: They differ.
    """
    if fingerprint != begun_with:
        raise ConfigError("the text is not that which the run began with", where="--data", instead="a new run")


def new_job(
    options: Mapping[str, Any], out: Path | None, placement: Placement, device: DeviceKind, restarted_by: str = ""
) -> Job:
    """A run from its first step.

    Args:
        options: Fields of `TrainConfig` that are not to have their defaults.
        out: Folder of the run; None for one named after the time.
        placement: Where ranks are to run.
        device: What the user asked for.
        restarted_by: The launcher that has started this process again: a run in `out` that it began is this one.

    Raises:
        ConfigError: An option, the folder or the text is refused.
    """
    config = TrainConfig.from_dict(options)
    _check_ranks(config, placement)
    folder = new_folder(out, restarted_by)
    _refuse_inside_text(folder, config.data)
    # Whatever is refused above is refused without importing torch.
    from fsdp_compile.training.data import read_corpus

    fingerprint = read_corpus(config.data, config.seq_len).fingerprint
    run = uuid.uuid4().hex
    if folder.config.exists():
        started = folder.read_config()
        check_same_text(fingerprint, started.fingerprint)
        run = started.run
    return Job(
        config=config,
        folder=folder,
        run=run,
        fingerprint=fingerprint,
        done_steps=0,
        ranks=placement.ranks,
        device=device.resolve(placement.local_ranks),
    )


def resumed_job(options: Mapping[str, Any], path: Path | None, placement: Placement, device: DeviceKind) -> Job:
    """A run that goes on from its last checkpoint.

    Args:
        options: Fields of `TrainConfig` that are to change.
        path: Folder of the run; None for the newest.
        placement: Where ranks are to run; their number may differ from before.
        device: What the user asked for.

    Raises:
        ConfigError: There is nothing to go on from, the text has changed, or an option cannot change.
    """
    folder = newest_folder() if path is None else RunFolder(path)
    started = folder.read_config()
    config = started.config.resumed_with(options)
    _check_ranks(config, placement)
    checkpoints = CheckpointFolder(folder.checkpoints, started.run)
    done_steps = _done_steps(checkpoints, config.steps)
    if done_steps >= config.steps:
        raise ConfigError(
            f"the run in {folder.path} has already done its {config.steps} steps",
            where="--resume",
            instead=f"--steps with more than {done_steps} to train on",
        )
    # Whatever is refused above is refused without importing torch.
    from fsdp_compile.training.data import read_corpus

    check_same_text(read_corpus(config.data, config.seq_len).fingerprint, started.fingerprint)
    return Job(
        config=config,
        folder=folder,
        run=started.run,
        fingerprint=started.fingerprint,
        done_steps=done_steps,
        ranks=placement.ranks,
        device=device.resolve(placement.local_ranks),
    )


def _refuse_inside_text(folder: RunFolder, data: str | None) -> None:
    """Refuses a run whose files would become text that it trains on: each restart would find another text."""
    if data is not None and folder.path.resolve().is_relative_to(Path(data).resolve()):
        raise ConfigError(
            f"the run's folder {folder.path} is inside of the text, {data}, which would change as the run writes there",
            where="--out, --data",
            instead="--out with a folder elsewhere, or --data with a folder of text alone",
        )


def _done_steps(checkpoints: CheckpointFolder, steps: int) -> int:
    """Steps of the checkpoint that a run of so many steps goes on from.

    Raises:
        ConfigError: There is none.
    """
    check = Check.SIZES  # ranks compare the contents of what they load
    checkpoint = checkpoints.newest(check)
    if checkpoint is not None and (step_of(checkpoint) or 0) >= steps:
        check = Check.CONTENTS  # no rank loads it if the run is done
        checkpoint = checkpoints.newest(check)
    if checkpoint is None:
        problems = [str(checkpoints.problem_with(path, check)) for path in checkpoints.candidates()]
        raise ConfigError(
            "; ".join([f"{checkpoints.path.parent} holds no complete checkpoint", *problems]),
            where="--resume",
            instead="a new run",
        )
    return step_of(checkpoint) or 0


def _check_ranks(config: TrainConfig, placement: Placement) -> None:
    """Refuses ranks that batches or replicas do not divide over."""
    if placement.ranks % config.replicas:
        raise ConfigError(
            f"{placement.ranks} ranks cannot be divided into {config.replicas} replicas of one size",
            where="--replicas",
            instead=f"a divisor of {placement.ranks}, or another number of ranks",
        )
    rest = config.batch_size % placement.ranks
    if rest:
        raise ConfigError(
            f"{placement.ranks} ranks cannot share {config.batch_size} sequences evenly",
            where="--batch-size",
            instead=f"a multiple of {placement.ranks}, such as {config.batch_size - rest + placement.ranks}",
        )
