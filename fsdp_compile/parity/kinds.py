"""The kinds of comparisons, without torch: the command line is checked before anything large is imported."""

from __future__ import annotations

from enum import StrEnum

from fsdp_compile.errors import ConfigError


class Reference(StrEnum):
    """What the compiled model is compared with; all of them run eagerly."""

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
    """Up to the bounds of `compare.py`, which follow from dtypes, lengths of sums and depth."""


class Accumulation(StrEnum):
    """How the gradients of the micro-batches of one step are accumulated."""

    REDUCE_EACH = "reduce-each"
    """Every micro-batch is reduced, and sharded gradients are added."""
    HOLD = "hold"
    """Gradients of all micro-batches but the last accumulate unreduced, as inside of `no_sync`."""


def check_counts(world_size: int, replicas: int, *, steps: int, micro_batches: int) -> None:
    """Refuses numbers that are not positive, and ranks that replicas do not divide.

    Raises:
        ConfigError: If one is wrong.
    """
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
