"""Options that have names, without torch: a command line is read, and refused, before it is imported.

Where names belong to values (a device to its numbers, a pass to its class), `tests/test_imports.py` compares the two.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from enum import StrEnum
from typing import Final

from fsdp_compile.errors import ConfigError

DEVICES: Final = ("b200", "h200-sxm", "h100-sxm", "h100-nvl", "h100-pcie", "gh200", "a100-sxm", "cpu")
LINKS: Final = ("ib-400", "ib-200", "nvlink5", "nvlink4", "nvlink3", "pcie-5", "ethernet-10", "ethernet-1")
DTYPES: Final = ("bfloat16", "float16", "float32")
LOWER: Final = ("inductor", "eager")
REGIONS: Final = ("auto", "whole", "blocks")
STAGES: Final = ("after-insert", "after-bucket", "final")

FORWARD_PREFETCH: Final = "forward_prefetch"
BACKWARD_PREFETCH: Final = ("BACKWARD_PRE", "BACKWARD_POST", "none")
SHORT_FORMS: Final = (*BACKWARD_PREFETCH, *(f"{name}+{FORWARD_PREFETCH}" for name in BACKWARD_PREFETCH))
"""Names of FSDP1's rules."""

DEFAULT_PASSES: Final = (
    "insert-collectives",
    "bucket",
    "update-in-backward",
    "hide-own-collectives",
    "delay-weight-gradients",
    "schedule-auto",
    "explicit-prefetch",
    "schedule-reshard",
)
"""The passes of a compile without options, in their order."""
PASSES: Final = (*DEFAULT_PASSES, "schedule-fsdp1", "schedule-reduce", "schedule-prefetch")


class Reference(StrEnum):
    """What parity compares the compiled model with; all of them run eagerly."""

    SINGLE = "single"
    """One unsharded process on the whole batch."""
    DDP = "ddp"
    """`DistributedDataParallel`."""
    FSDP2 = "fsdp2"
    """`torch.distributed.fsdp.fully_shard` at its defaults."""
    FSDP1 = "fsdp1"
    """`FullyShardedDataParallel`, with the original parameters."""


class Level(StrEnum):
    """How equal the two must be."""

    BITWISE = "bitwise"
    """Every bit of every loss, gradient, parameter and optimizer state."""
    TOLERANCE = "tolerance"
    """Up to the bounds of `parity/compare.py`, which follow from dtypes, lengths of sums and depth."""


class Accumulation(StrEnum):
    """How the gradients of the micro-batches of one step are accumulated."""

    REDUCE_EACH = "reduce-each"
    """Every micro-batch is reduced, and sharded gradients are added."""
    HOLD = "hold"
    """Gradients of all micro-batches but the last accumulate unreduced, as inside of `no_sync`."""


def check_name(name: str, known: Collection[str], what: str) -> None:
    """Raises `ConfigError`, with those that are known, for the name of a device or link that is not."""
    if name not in known:
        instead = f"one of {', '.join(known)}"
        raise ConfigError(f"there is no {what} {name!r}", where=f"hardware({what}=...)", instead=instead)


def check_rate(gb_per_s: float) -> None:
    """Raises `ConfigError` for the rate of a link that is no positive number."""
    if not 0 < gb_per_s < math.inf:
        raise ConfigError(f"a link of {gb_per_s} GB/s sends nothing", where="hardware(link=...)", instead="50")


def check_pass(name: str) -> None:
    """Raises `ConfigError`, with the nearest known one, for the name of a pass that does not exist."""
    if name not in PASSES:
        near = difflib.get_close_matches(name, PASSES, n=1, cutoff=0.4)
        raise ConfigError(f"there is no pass {name}", where="--passes", instead=near[0] if near else ", ".join(PASSES))


def check_prefetch(value: object) -> None:
    """Raises `ConfigError` for what is neither "auto" nor a distance nor one of `SHORT_FORMS`."""
    named = isinstance(value, str) and value in ("auto", *SHORT_FORMS)
    # Not `isinstance`: a bool is an int, and no distance.
    if not named and (type(value) is not int or value < 0):
        names = ", ".join(f'"{name}"' for name in SHORT_FORMS)
        raise bad_option("prefetch", value, f'"auto", 0, 1, 2, ..., {names} or FSDPPrefetch(...)')


def check_world_size(world_size: int | None, where: str = "explain(world_size=...)") -> int:
    """The number of ranks to plan for; raises `ConfigError` if it is not given, or not positive."""
    if world_size is None or world_size < 1:
        raise ConfigError(
            "the number of ranks to plan for is not given"
            if world_size is None
            else f"cannot plan for {world_size} ranks",
            where=where,
            instead="the number of ranks, such as 64",
        )
    return world_size


def check_counts(world_size: int, replicas: int, *, steps: int, micro_batches: int) -> None:
    """Raises `ConfigError` for numbers that are not positive, and for ranks that replicas do not divide."""
    counts = {"world_size": world_size, "steps": steps, "replicas": replicas, "micro_batches": micro_batches}
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            where = f"check_parity({name}=...)"
            raise ConfigError(f"{value!r} is not a positive whole number", where=where, instead="1, 2, 3, ...")
    if world_size % replicas:
        raise ConfigError(
            f"{world_size} ranks cannot form {replicas} equal groups",
            where="check_parity(replicas=...)",
            instead=f"a divisor of {world_size}",
        )


def bad_option(name: str, value: object, allowed: str) -> ConfigError:
    """The error for a value that an option of the compile cannot have."""
    return ConfigError(f"option {name!r} cannot be {value!r}", where=f"options={{{name!r}: ...}}", instead=allowed)
