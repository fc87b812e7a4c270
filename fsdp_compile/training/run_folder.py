"""The folder of one run: where everything is that a run leaves behind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fsdp_compile.errors import ConfigError
from fsdp_compile.training.config import TrainConfig

RUNS = Path("runs")


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run.

    Attributes:
        path: The folder.
    """

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

    def write_config(self, config: TrainConfig, fingerprint: str) -> None:
        """Make the folder and write what `read_config` reads.

        Args:
            config: What is trained.
            fingerprint: Hash of the text.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        written = {"options": config.to_dict(), "text_fingerprint": fingerprint}
        aside = self.config.with_suffix(".partial")  # a resumed run that is interrupted here can be resumed again
        aside.write_text(json.dumps(written, indent=2) + "\n")
        aside.replace(self.config)

    def read_config(self) -> tuple[TrainConfig, str]:
        """The options and the text's hash of the run in this folder.

        Raises:
            ConfigError: No run was started here, or the file is damaged.
        """
        if not self.config.is_file():
            raise ConfigError(f"there is no run in {self.path}", where="--resume", instead="the --out folder of a run")
        try:
            written: dict[str, Any] = json.loads(self.config.read_text())
            return TrainConfig.from_dict(written["options"]), written["text_fingerprint"]
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{self.config} is damaged: {error}", where="--resume", instead="a new run") from error


def new_folder(out: Path | None) -> RunFolder:
    """The folder of a new run.

    Args:
        out: Where the user wants it; None for one below `RUNS` named after the time.

    Raises:
        ConfigError: A run was started there before, or there is a file instead of a folder.
    """
    folder = RunFolder(out or RUNS / datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S"))
    for path in (folder.path, *folder.path.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file", where="--out", instead="a folder, or a path that is free")
    if folder.config.exists():
        raise ConfigError(
            f"there is a run in {folder.path} already",
            where="--out",
            instead=f"another folder, or --resume {folder.path}",
        )
    return folder


def newest_folder() -> RunFolder:
    """The run below `RUNS` that was started last.

    Raises:
        ConfigError: There is none.
    """
    configs = sorted(RUNS.glob("*/config.json"), key=lambda config: config.parent.name)
    if not configs:
        raise ConfigError(f"there is no run to resume below {RUNS}", where="--resume", instead="--resume FOLDER")
    return RunFolder(configs[-1].parent)
