"""Every option of a training run, documented, with its default and its bounds; and the learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from fsdp_compile.errors import ConfigError

SMALLEST_TEMPERATURE = 1e-6
"""Above 0: what the model says of a byte is divided by it, and has to stay a number of float32."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate that depends on the step alone, so a resumed run needs no state of it.

    Attributes:
        highest: Learning rate at the end of the rise.
        last: Learning rate of the last step.
        warmup_steps: Steps of the rise.
    """

    highest: float
    last: float
    warmup_steps: int
    steps: int

    @classmethod
    def of(cls, config: TrainConfig) -> Schedule:
        """The schedule that the options ask for."""
        return cls(
            highest=config.learning_rate,
            last=config.learning_rate * config.final_ratio,
            warmup_steps=round(config.steps * config.warmup_ratio),
            steps=config.steps,
        )

    def __call__(self, step: int) -> float:
        """The learning rate of a step, counted from 1.

        Returns:
            `highest / warmup_steps` at step 1, `highest` at `warmup_steps`, `last` at `steps`.
        """
        if step <= self.warmup_steps:
            return self.highest * step / self.warmup_steps
        done = (step - self.warmup_steps) / (self.steps - self.warmup_steps)
        return self.last + (self.highest - self.last) * (1 + math.cos(math.pi * done)) / 2


class MixedPrecision(StrEnum):
    """In which type weights are gathered and computed with; shards and AdamW state stay float32."""

    NONE = "none"
    BF16 = "bf16"


class OnNonFinite(StrEnum):
    """What a step does whose loss or gradients are not finite: nothing is updated with them in any case."""

    STOP = "stop"
    SKIP = "skip"


class OnResume(StrEnum):
    """Whether a resumed run may be given another value of an option."""

    FREE = "free"
    FIXED = "fixed"


def option(
    default: Any,
    about: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    on_resume: OnResume = OnResume.FREE,
) -> Any:
    """A field of `TrainConfig`: its default, its help text with units, its bounds.

    Args:
        default: The value where none is given.
        about: One line for `--help`, with units.
        at_least: Smallest value allowed.
        above: Largest value that is too small.
        at_most: Largest value allowed.
        on_resume: FIXED where another value would make a resumed run meaningless.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most}
    return field(default=default, metadata={"about": about, "bounds": bounds, "on_resume": on_resume})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All options that decide what a run computes. The number of ranks is not one of them.

    Raises:
        ConfigError: A value is out of its bounds, or two contradict each other.
    """

    data: str | None = option(
        None,
        "text to learn, a file or a folder (default: the source text of Python's standard library)",
        on_resume=OnResume.FIXED,
    )
    steps: int = option(300, "optimizer steps in all", at_least=1)
    batch_size: int = option(
        16,
        "sequences per step over all ranks; a multiple of their number",
        at_least=1,
        on_resume=OnResume.FIXED,
    )
    seq_len: int = option(256, "tokens (bytes of text) per sequence", at_least=2, on_resume=OnResume.FIXED)
    width: int = option(128, "features per position", at_least=2, on_resume=OnResume.FIXED)
    layers: int = option(4, "transformer blocks", at_least=1, on_resume=OnResume.FIXED)
    heads: int = option(4, "attention heads per block", at_least=1, on_resume=OnResume.FIXED)
    # AdamW's step sizes are numbers of float32, and torch refuses larger ones in the middle of a step.
    learning_rate: float = option(4e-3, "highest learning rate of AdamW", above=0, at_most=1e30)
    warmup_ratio: float = option(
        0.1, "share of the steps in which the learning rate rises from 0", at_least=0, at_most=1
    )
    final_ratio: float = option(
        0.1, "last learning rate as a share of the highest, reached along a cosine", at_least=0, at_most=1
    )
    weight_decay: float = option(
        0.1, "weight decay of AdamW per step and unit of learning rate", at_least=0, at_most=1e6
    )
    clip_norm: float = option(1.0, "largest norm of all gradients together", above=0)
    mixed_precision: MixedPrecision = option(  # noqa: RUF009 (an enum member is immutable)
        MixedPrecision.NONE, "bf16: gather and compute in bfloat16, reduce gradients in float32"
    )
    replicas: int = option(
        1, "copies of the model: each is sharded over ranks / replicas ranks (hybrid sharding)", at_least=1
    )
    on_nonfinite: OnNonFinite = option(  # noqa: RUF009 (an enum member is immutable)
        OnNonFinite.STOP, "where a loss or a gradient is not finite: stop ends the run, skip goes on without an update"
    )
    seed: int = option(
        0, "decides initial weights, batches and sample", at_least=0, at_most=2**63 - 1, on_resume=OnResume.FIXED
    )
    log_every: int = option(5, "steps between two lines of metrics", at_least=1)
    eval_every: int = option(50, "steps between two held-out losses", at_least=1)
    eval_batches: int = option(4, "batches of held-out text per held-out loss", at_least=1, on_resume=OnResume.FIXED)
    checkpoint_every: int = option(50, "steps between two checkpoints", at_least=1)
    keep_checkpoints: int = option(2, "newest checkpoints of the run that are kept", at_least=1)
    async_checkpoints: bool = option(
        default=False,
        about="go on training while checkpoints are written, from a copy of parameters and AdamW state on the host",
    )
    prompt: str = option("def ", "text that the sample at the end continues")
    sample_bytes: int = option(256, "length in bytes of the sample at the end; 0 for none", at_least=0)
    temperature: float = option(0.6, "randomness of the sample: 0 takes the likeliest byte", at_least=0)

    def __post_init__(self) -> None:
        for each in fields(self):
            _check_bounds(each, getattr(self, each.name))
        if 0 < self.temperature < SMALLEST_TEMPERATURE:
            raise ConfigError(
                f"{self.temperature} is out of bounds",
                where="--temperature",
                instead=f"{SMALLEST_TEMPERATURE} or more, or 0 for the likeliest byte",
            )
        if self.width % self.heads != 0 or self.width // self.heads % 2 != 0:
            raise ConfigError(
                f"{self.heads} heads do not split {self.width} features into even parts",
                where="--width, --heads",
                instead="a width that is a multiple of twice the heads",
            )
        if not self.prompt and self.sample_bytes > 0:
            raise ConfigError("a sample needs a text to continue", where="--prompt", instead="--sample-bytes 0")

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The options that `to_dict` gave; defaults for those left out.

        Raises:
            ConfigError: A name is not an option, or a value is impossible.
        """
        unknown = sorted(set(values) - {each.name for each in fields(cls)})
        if unknown:
            raise ConfigError(f"unknown training options: {', '.join(unknown)}")
        values = dict(values)
        for name, kind in (("mixed_precision", MixedPrecision), ("on_nonfinite", OnNonFinite)):
            if name in values:
                values[name] = kind(values[name])
        return cls(**values)

    def resumed_with(self, changes: Mapping[str, Any]) -> TrainConfig:
        """These options with changes, by field name, for a resumed run.

        Raises:
            ConfigError: An option that must stay the same would change.
        """
        for each in fields(self):
            fixed = each.metadata["on_resume"] is OnResume.FIXED
            now = getattr(self, each.name)
            if fixed and changes.get(each.name, now) != now:
                raise ConfigError(
                    f"the run was started with {now}, a resumed run cannot change that",
                    where=flag(each.name),
                    instead=f"leave {flag(each.name)} away, or start a new run",
                )
        return self.from_dict(self.to_dict() | dict(changes))


def flag(name: str) -> str:
    """The command-line flag of a field: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


def _check_bounds(each: Field[Any], value: Any) -> None:
    bounds = each.metadata["bounds"]
    wanted = None
    if isinstance(value, float) and not math.isfinite(value):
        wanted = "a finite number"
    elif bounds["at_least"] is not None and value < bounds["at_least"]:
        wanted = f"{bounds['at_least']} or more"
    elif bounds["above"] is not None and value <= bounds["above"]:
        wanted = f"a number above {bounds['above']}"
    elif bounds["at_most"] is not None and value > bounds["at_most"]:
        wanted = f"{bounds['at_most']} or less"
    if wanted is not None:
        raise ConfigError(f"{value} is out of bounds", where=flag(each.name), instead=wanted)
