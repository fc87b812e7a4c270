"""Every option of a training run, documented, with its default and its bounds; and the learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from fsdp_compile.errors import ConfigError

FIXED = frozenset({"batch_size", "seq_len", "width", "layers", "heads", "seed", "eval_batches"})
"""Options that a resumed run cannot change: it would be another run. Its text may have moved."""
INF = math.inf


class MixedPrecision(StrEnum):
    """In which type weights are gathered and computed with; shards and AdamW state stay float32."""

    NONE = "none"
    BF16 = "bf16"


class OnNonFinite(StrEnum):
    """What a step does whose loss or gradients are not finite: nothing is updated with them in any case."""

    STOP = "stop"
    SKIP = "skip"


def option(default: Any, about: str, *, at_least: float = -INF, above: float = -INF, at_most: float = INF) -> Any:
    """A field of `TrainConfig`: its default, its line of `--help` with units, its bounds."""
    return field(default=default, metadata={"about": about, "bounds": (at_least, above, at_most)})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All options that decide what a run computes, checked. The number of ranks is not one of them."""

    data: str | None = option(None, "text to learn, a file or a folder (default: the source of Python's own library)")
    steps: int = option(300, "optimizer steps in all", at_least=1)
    batch_size: int = option(16, "sequences per step over all ranks; a multiple of their number", at_least=1)
    seq_len: int = option(256, "tokens (bytes of text) per sequence", at_least=2)
    width: int = option(128, "features per position", at_least=2)
    layers: int = option(4, "transformer blocks", at_least=1)
    heads: int = option(4, "attention heads per block", at_least=1)
    # AdamW's step sizes are numbers of float32, and torch refuses larger ones in the middle of a step.
    learning_rate: float = option(4e-3, "highest learning rate of AdamW", above=0, at_most=1e30)
    warmup_ratio: float = option(0.1, "share of the steps in which the rate rises from 0", at_least=0, at_most=1)
    final_ratio: float = option(0.1, "last rate as a share of the highest, along a cosine", at_least=0, at_most=1)
    weight_decay: float = option(0.1, "of AdamW, per step and unit of learning rate", at_least=0, at_most=1e6)
    clip_norm: float = option(1.0, "largest norm of all gradients together", above=0)
    mixed_precision: MixedPrecision = option("none", "bf16: gather and compute in bfloat16, reduce in float32")  # noqa: RUF009
    replicas: int = option(1, "copies of the model, each sharded over ranks / replicas ranks", at_least=1)
    on_nonfinite: OnNonFinite = option("stop", "a loss or gradient not finite: stop ends, skip goes on without update")  # noqa: RUF009
    seed: int = option(0, "decides initial weights and batches", at_least=0, at_most=2**63 - 1)
    log_every: int = option(5, "steps between two lines of metrics", at_least=1)
    profile: bool = option(default=False, about="print the times of the third step, planned and measured")
    eval_every: int = option(50, "steps between two held-out losses", at_least=1)
    eval_batches: int = option(4, "batches of held-out text per held-out loss", at_least=1)
    checkpoint_every: int = option(50, "steps between two checkpoints", at_least=1)
    keep_checkpoints: int = option(2, "newest checkpoints of the run that are kept", at_least=1)
    async_checkpoints: bool = option(default=False, about="go on while checkpoints are written from a copy on the host")

    def __post_init__(self) -> None:
        # From the command line and from JSON they come as text.
        object.__setattr__(self, "mixed_precision", MixedPrecision(self.mixed_precision))
        object.__setattr__(self, "on_nonfinite", OnNonFinite(self.on_nonfinite))
        for each in fields(self):
            _check_bounds(each, getattr(self, each.name))
        if self.width % self.heads != 0 or self.width // self.heads % 2 != 0:
            what = f"{self.heads} heads do not split {self.width} features into even parts"
            raise ConfigError(what, where="--width, --heads", instead="a width that is a multiple of twice the heads")

    def learning_rate_of(self, step: int) -> float:
        """The learning rate of a step, counted from 1: it depends on the step alone, so a resumed run needs no state.

        Returns:
            A line from 0 to `learning_rate` at the last warmup step, then a cosine down to `final_ratio` of it.
        """
        warmup_steps = round(self.steps * self.warmup_ratio)
        if step <= warmup_steps:
            return self.learning_rate * step / warmup_steps
        last = self.learning_rate * self.final_ratio
        done = (step - warmup_steps) / (self.steps - warmup_steps)
        return last + (self.learning_rate - last) * (1 + math.cos(math.pi * done)) / 2

    def resumed_with(self, changes: Mapping[str, Any]) -> TrainConfig:
        """These options with changes, by field name, for a resumed run.

        Raises:
            ConfigError: An option that must stay the same would change.
        """
        for name in FIXED & changes.keys():
            if changes[name] != (now := getattr(self, name)):
                what = f"the run was started with {now}, a resumed run cannot change that"
                raise ConfigError(what, where=flag(name), instead=f"leave {flag(name)} away, or start a new run")
        return replace(self, **changes)


def flag(name: str) -> str:
    """The command-line flag of a field: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


def _check_bounds(each: Field[Any], value: Any) -> None:
    at_least, above, at_most = bounds = each.metadata["bounds"]
    if bounds == (-INF, -INF, INF):
        return
    wrong = {
        "a finite number": not -INF < value < INF,  # NaN is not either
        f"{at_least} or more": value < at_least,
        f"a number above {above}": value <= above,
        f"{at_most} or less": value > at_most,
    }
    for wanted, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"{value} is out of bounds", where=flag(each.name), instead=wanted)
