"""One run: what it trains, its folder and files, on how many ranks, new or resumed; torch is imported late."""

from __future__ import annotations

import errno
import fcntl
import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fsdp_compile.comm.placement import TIMEOUT_S, DeviceKind, Placement
from fsdp_compile.errors import ConfigError
from fsdp_compile.formats.files import check_contents, check_size
from fsdp_compile.training.checkpoint_folder import CheckpointFolder, step_of
from fsdp_compile.training.config import TrainConfig

RUNS = Path("runs")
CONFIG, METRICS, CHECKPOINTS = "config.json", "metrics.jsonl", "checkpoints"
"""Names in a run's folder: a `Run`, `metrics.Record`s, a `CheckpointFolder`."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run was started with, as its `config.json` says.

    `run` tells it from other runs, and `launcher` the elastic launcher that started its ranks ("" for none).
    """

    options: TrainConfig
    text_fingerprint: str
    run: str
    launcher: str = ""

    def write(self, folder: Path) -> None:
        """Make the run's folder and its `config.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        aside = (folder / CONFIG).with_suffix(".partial")  # a resumed run that is interrupted here can be resumed again
        aside.write_text(json.dumps(asdict(self), indent=2) + "\n")
        aside.replace(folder / CONFIG)

    @classmethod
    def read(cls, folder: Path) -> Run:
        """What the run in a folder was started with; `ConfigError` if there is none, or the file is damaged."""
        path = folder / CONFIG
        if not path.is_file():
            raise ConfigError(f"there is no run in {folder}", where="--resume", instead="the --out folder of a run")
        try:
            written: dict[str, Any] = json.loads(path.read_text())
            return cls(**written | {"options": TrainConfig(**written["options"])})
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", where="--resume") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is damaged: {error}", where="--resume", instead="a new run") from error


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run whose options were all checked, before anything is started for it.

    `ranks` is their number on all hosts, `timeout_s` how long one waits for others before all end, and `restart` which
    one this is of how many, and why ("" the first time).
    """

    run: Run
    folder: Path
    ranks: int
    device: DeviceKind
    timeout_s: float = TIMEOUT_S
    restart: str = ""

    @property
    def checkpoints(self) -> CheckpointFolder:
        """The checkpoints of the run."""
        return CheckpointFolder(self.folder / CHECKPOINTS, self.run.run)


def new_job(
    options: Mapping[str, Any], out: Path | None, placement: Placement, device: DeviceKind, restarted_by: str = ""
) -> Job:
    """A run in the folder `out`, or, for None, in one below `RUNS` that is named after the time.

    Where a launcher has started this process again, `restarted_by`, a run in `out` that it began is this one.

    Raises:
        ConfigError: An option (a field of `TrainConfig`), the folder or the text is not possible.
    """
    config = TrainConfig(**options)
    _check_ranks(config, placement)
    folder = out or RUNS / datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file", where="--out", instead="a folder, or a path that is free")
    run = Run(options=config, text_fingerprint="", run=uuid.uuid4().hex)
    if (folder / CONFIG).exists():
        if not restarted_by or Run.read(folder).launcher != restarted_by:
            instead = f"another folder, or --resume {folder}"
            raise ConfigError(f"there is a run in {folder} already", where="--out", instead=instead)
        run = replace(Run.read(folder), options=config)
    if config.data is not None and folder.resolve().is_relative_to(Path(config.data).resolve()):
        what = f"the run's folder {folder} is inside of the text, {config.data}, which would change with it"
        instead = "--out with a folder elsewhere, or --data with a folder of nothing but text"
        raise ConfigError(what, where="--out, --data", instead=instead)
    return _job(run, folder, placement, device)


def resumed_job(options: Mapping[str, Any], path: Path | None, placement: Placement, device: DeviceKind) -> Job:
    """A run that goes on from its last checkpoint, in `path`, or, for None, in the newest folder.

    Raises:
        ConfigError: There is nothing to go on from, the text has changed, or one of `options` cannot change.
    """
    folder = newest_folder() if path is None else path
    begun = Run.read(folder)
    run = replace(begun, options=begun.options.resumed_with(options))
    _check_ranks(run.options, placement)
    steps = run.options.steps
    checkpoints = CheckpointFolder(folder / CHECKPOINTS, run.run)
    # Ranks compare the contents of what they load; of a run that is done they load nothing.
    check = check_contents if step_of(checkpoints.newest()) >= steps else check_size
    newest = checkpoints.newest(check)
    if newest is None:
        problems = [str(checkpoints.problem_with(path, check)) for path in checkpoints.candidates()]
        what = "; ".join([f"{folder} holds no complete checkpoint", *problems])
        raise ConfigError(what, where="--resume", instead="a new run")
    if step_of(newest) >= steps:
        instead = f"--steps with more than {step_of(newest)} to train on"
        raise ConfigError(f"the run in {folder} has already done its {steps} steps", where="--resume", instead=instead)
    return _job(run, folder, placement, device)


def newest_folder() -> Path:
    """The folder of the run below `RUNS` that was started or resumed last, whatever its name, or `ConfigError`."""
    configs = sorted(RUNS.glob(f"*/{CONFIG}"), key=lambda config: (config.stat().st_mtime_ns, config.parent.name))
    if not configs:
        raise ConfigError(f"there is no run to resume below {RUNS}", where="--resume", instead="--resume FOLDER")
    return configs[-1].parent


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, in which two processes would write over each other's files.

    It ends with this process, whatever ends that. File systems that have no locks are used without one.

    Raises:
        ConfigError: Another process holds it, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        what = f"cannot write in {folder}: {error.strerror}"
        raise ConfigError(what, where="--out", instead="a folder that you may write in") from None
    with file:
        try:
            # Of this process: compilers that it forks, and that may outlive it, do not hold it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                what = f"another process trains in {folder}"
                raise ConfigError(what, where="the run's folder", instead="wait until it has ended") from None
        yield


def _job(run: Run, folder: Path, placement: Placement, device: DeviceKind) -> Job:
    # Whatever is refused before is refused without importing torch.
    from fsdp_compile.training.data import read_corpus

    fingerprint = read_corpus(run.options.data, run.options.seq_len).fingerprint
    if run.text_fingerprint not in ("", fingerprint):
        instead = "--data with the text that it began with, or a new run"
        raise ConfigError("the text is not that which the run began with", where="--data", instead=instead)
    resolved = device.resolve(placement.started_here or placement.ranks)
    return Job(run=replace(run, text_fingerprint=fingerprint), folder=folder, ranks=placement.ranks, device=resolved)


def _check_ranks(config: TrainConfig, placement: Placement) -> None:
    """Refuses ranks that batches or replicas do not divide over."""
    ranks = placement.ranks
    if ranks % config.replicas:
        what = f"{ranks} ranks cannot be divided into {config.replicas} replicas of one size"
        raise ConfigError(what, where="--replicas", instead=f"a divisor of {ranks}, or another number of ranks")
    rest = config.batch_size % ranks
    if rest:
        what = f"{ranks} ranks cannot share {config.batch_size} sequences evenly"
        instead = f"a multiple of {ranks}, such as {config.batch_size - rest + ranks}"
        raise ConfigError(what, where="--batch-size", instead=instead)
