"""What a step on the emulated network takes and sends at least: two numbers to hold each contender against.

- **busy**: the larger of compute and of the time of the bytes that this run has sent. A run below 100 % of it has let
  both lanes stand still; one that sends more than it must can still reach it.
- **bound**: what no schedule that holds as much as this contender can beat. It is a simpler form of
  `lower_bound.py`, with measured compute:

      forward  = P (N-1)/N                                    bytes that come before forward ends
      backward = (max(0, P - I - room) + P) (N-1)/N           what backward gathers again, and gradients: after that
      time     = max(compute + I (N-1)/N / bandwidth, forward / bandwidth + head + backward / bandwidth)

  `P` are all parameters and `I` is the input embedding: nothing but tables of positions can be computed before it has
  been gathered (they count as if they needed it, too), and backward does not need it. `room` is what the contender may
  hold of gathered parameters between forward and backward (`Held`). `head` is the time of the output embedding in
  forward, which needs all parameters: what could be sent meanwhile is what there is room for, and not in `backward`.
  The reduction of the embedding's gradient at the end is not in it, since weight gradients may be computed meanwhile.

Latencies, padding and the work of writing what a collective receives are left out of both.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from torch import nn

from benchmarks import models
from benchmarks.models import Task


class Held(enum.Enum):
    """What a contender holds of parameters, besides its shards."""

    WHOLE = "everything, for itself"
    """Nothing is sent: not a data-parallel step, and the compute of all others."""
    SUMMED = "everything, always"
    """Nothing is gathered; gradients are summed on every rank."""
    GATHERED = "what was gathered, from forward to backward"
    ROOT_AND_TWO = "the root unit from forward to backward, a block and the next"
    TWO = "a unit and the next"
    TWO_NO_INPUT = "a unit and the next, of an embedding its shard alone"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parameters, as they are gathered.

    Attributes:
        all_bytes: Of the model.
        input_bytes: Of its input embedding.
        block_bytes: Of a repeated block.
        root_bytes: Outside of blocks.
    """

    all_bytes: int
    input_bytes: int
    block_bytes: int
    root_bytes: int

    @property
    def unit_bytes(self) -> int:
        """The largest of the units: a block, or the embedding or head that is one by itself."""
        return max(self.block_bytes, self.input_bytes)

    def to_dict(self) -> dict[str, int]:
        """As plain data, by field."""
        return dataclasses.asdict(self)


def sizes_of(task: Task, narrowing: int = 1) -> Sizes:
    """Sizes of what a task trains, if parameters are gathered in `1 / narrowing` of their bytes."""
    model = task.make()
    blocks = [module for module in model.modules() if isinstance(module, task.block)]
    in_blocks = sum(map(models.parameter_bytes, blocks))
    whole, embedding = models.parameter_bytes(model), next(m for m in model.modules() if isinstance(m, nn.Embedding))
    return Sizes(
        all_bytes=whole // narrowing,
        input_bytes=models.parameter_bytes(embedding) // narrowing,
        block_bytes=max(map(models.parameter_bytes, blocks)) // narrowing,
        root_bytes=(whole - in_blocks) // narrowing,
    )


@dataclasses.dataclass(frozen=True)
class Least:
    """Bytes that a rank sends at least.

    Attributes:
        first: Of these, those before anything can be computed.
        forward: Before forward ends.
        backward: After that.
    """

    first: float
    forward: float
    backward: float

    @property
    def total(self) -> float:
        """In a step."""
        return self.forward + self.backward


def least_bytes(held: Held, sizes: Sizes, ranks: int, exchanged_bytes: float = 0.0) -> Least:
    """What each rank sends at least.

    Args:
        held: What it holds.
        sizes: Of the model.
        ranks: That share it.
        exchanged_bytes: What it sends in exchanges of rows, which have the place of the embedding.
    """
    others = (ranks - 1) / ranks
    all_sent = sizes.all_bytes * others
    rest_bytes = sizes.all_bytes - sizes.input_bytes
    match held:
        case Held.WHOLE:
            return Least(0.0, 0.0, 0.0)
        case Held.SUMMED:
            # Of an all-reduce, a part goes to each rank and a sum comes back.
            return Least(0.0, 0.0, 2 * all_sent)
        case Held.GATHERED:
            return Least(sizes.input_bytes * others, all_sent, all_sent)
        case Held.ROOT_AND_TWO:
            again_bytes = max(0, rest_bytes - sizes.root_bytes - 2 * sizes.block_bytes)
        case Held.TWO | Held.TWO_NO_INPUT:
            again_bytes = max(0, rest_bytes - 2 * sizes.unit_bytes)
    if held is Held.TWO_NO_INPUT:
        return Least(0.0, rest_bytes * others + exchanged_bytes, (again_bytes + rest_bytes) * others)
    return Least(sizes.input_bytes * others, all_sent, again_bytes * others + all_sent)


def busy_s(compute_s: float, sent_bytes: float, bytes_per_s: float) -> float:
    """The larger of compute and of the time of what was sent."""
    return max(compute_s, sent_bytes / bytes_per_s)


def bound_s(compute_s: float, head_s: float, least: Least, bytes_per_s: float) -> float:
    """The time that a step takes at least; see the module's docstring."""
    return max(compute_s + least.first / bytes_per_s, head_s + least.total / bytes_per_s)


SAME_MEMORY = frozenset({"artifacts", "bucket_mb", "embedding", "hardware", "inductor", "lower"})
"""Options of our backend that leave as it is what `Contender.held` says of it."""


def is_known(options: Mapping[str, Any]) -> bool:
    """Whether `Contender.held` is right for a run with these options of our backend."""
    return SAME_MEMORY.issuperset(options)


def exchanged_bytes(traffic: Mapping[str, Any]) -> float:
    """What a run has sent in exchanges of rows."""
    return float(traffic.get("sent_bytes", {}).get("all_to_all", 0.0))
