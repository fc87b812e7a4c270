"""The ways to shard and run a model that a search compares, and what each of them comes to."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final

from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.memory import Holder
from fsdp_compile.explain.rescale import Sharding
from fsdp_compile.layout.spec import Reshard
from fsdp_compile.layout.wire_formats import FORMATS


class Form(enum.StrEnum):
    """How the model is compiled, as `FSDPOptions.regions` says it."""

    WHOLE = "whole"
    BLOCKS = "blocks"


class Offload(enum.StrEnum):
    """What is kept in host memory."""

    NOTHING = "nothing"
    CPU = "cpu_offload"
    """Shards, their gradients and optimizer state: FSDP2's `CPUOffloadPolicy`."""


class Allowed(enum.StrEnum):
    """What is searched only where the caller allows it, since it changes numbers or hosts."""

    CPU_OFFLOAD = "cpu_offload"
    """Shards, their gradients and optimizer state in host memory."""
    INT8_GATHERS = "int8_gathers"
    """Large parameters are gathered in 8 bits: `MixedPrecision(gather_dtype=torch.int8)`."""


class Part(enum.StrEnum):
    """What the memory of a device is used for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    GATHERED = "gathered"
    RESERVE = "reserve"


PART_OF: Final = {
    Holder.SHARD: Part.PARAMETERS,
    Holder.SHARD_GRADIENT: Part.GRADIENTS,
    Holder.UNSHARDED: Part.GATHERED,
    Holder.GRADIENT: Part.GATHERED,
    Holder.SAVED: Part.ACTIVATIONS,
    Holder.INPUT: Part.ACTIVATIONS,
    Holder.OUTPUT: Part.ACTIVATIONS,
    Holder.TEMPORARY: Part.ACTIVATIONS,
}
"""What each use of memory in a graph counts as; full gradients are in messages, as gathered parameters are."""

RESHARDS: Final[Mapping[Reshard, Any]] = {
    Reshard.AFTER_FORWARD: True,
    Reshard.AUTO: "auto",
    Reshard.AFTER_BACKWARD: False,
}
"""Values of `fully_shard(reshard_after_forward=...)`, where no number of ranks is."""
GATHERED_IN: Final = FORMATS["int8"]
"""The format of gathers in 8 bits that is searched: of those, int8 rounds the least."""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer of torch's.

    Attributes:
        states: Numbers that it keeps for each parameter, in the parameter's dtype.
        call: How it is made.
    """

    states: int
    call: str


OPTIMIZERS: Final = {
    "adamw": Optimizer(2, "torch.optim.AdamW(model.parameters(), fused=True)"),
    "adam": Optimizer(2, "torch.optim.Adam(model.parameters(), fused=True)"),
    "adagrad": Optimizer(1, "torch.optim.Adagrad(model.parameters(), lr=0.01, fused=True)"),
    "sgd": Optimizer(0, "torch.optim.SGD(model.parameters(), lr=0.01, fused=True)"),
    "sgd-momentum": Optimizer(1, "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)"),
}
"""Optimizers by name; the fused forms take no temporary memory of the size of the parameters."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to shard and run a model; how many blocks are computed again follows from the memory.

    Attributes:
        shards: Ranks that share each parameter.
        replicas: Groups of such ranks.
        reshard: When gathered parameters are freed.
        micro_batch: Samples of a rank in one forward.
        accumulation: Forwards and backwards in a step.
        form: How the model is compiled.
        offload: What is kept in host memory.
        post_forward: Ranks that together keep each gathered parameter for backward; 1 if none do.
        gather_format: Name of the format in which large parameters are gathered; empty for their dtype.
    """

    shards: int
    replicas: int
    reshard: Reshard
    micro_batch: int
    accumulation: int
    form: Form = Form.WHOLE
    offload: Offload = Offload.NOTHING
    post_forward: int = 1
    gather_format: str = ""

    @property
    def sharding(self) -> Sharding:
        """For plans of graphs that were traced once."""
        compute = "cpu" if self.offload is Offload.CPU else ""  # graphs are traced for it, whatever the device is
        return Sharding(self.shards, self.replicas, self.reshard, compute, self.post_forward, self.gather_format)

    @property
    def mesh(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Shape of the device mesh, and names of its dimensions."""
        if self.replicas > 1:
            return (self.replicas, self.shards), ("replicate", "shard")
        return (self.shards,), ("shard",)

    @property
    def reshard_after_forward(self) -> Any:
        """Value of the argument of `fully_shard`."""
        return self.post_forward if self.post_forward > 1 else RESHARDS[self.reshard]

    @property
    def kept_share(self) -> float:
        """The share of each gathered parameter that a rank keeps from forward to backward, if nothing chooses it."""
        if self.post_forward > 1:
            return 1 / self.post_forward
        return float(self.reshard is Reshard.AFTER_BACKWARD)

    def needs_at_least(self, other: Choice) -> bool:
        """Whether it takes as much memory as another choice, or more."""
        counts: dict[str, Any] = {"shards": 0, "replicas": 0, "micro_batch": 0, "accumulation": 0}
        alike = dataclasses.replace(self, **counts) == dataclasses.replace(other, **counts)
        # Several micro-batches hold the gradients of the earlier ones.
        alike = alike and (self.accumulation > 1 or other.accumulation == 1)
        return alike and self.shards <= other.shards and self.micro_batch >= other.micro_batch

    def to_dict(self) -> dict[str, Any]:
        """Plain data, named as arguments and options are."""
        named = dataclasses.asdict(self) | {"reshard_after_forward": self.reshard_after_forward}
        del named["reshard"], named["post_forward"]
        return named


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A choice with its estimates.

    Attributes:
        choice: What is configured.
        step_us: Of a step: all its micro-batches, and the optimizer.
        tokens_per_s: Of all ranks.
        mfu: Share of the device's peak that the model's own operations take; what is computed again does not count.
        memory: Bytes of each part where the sum is largest.
        recomputed: Blocks that are computed again in backward.
        blocks: That could be.
        budget_gb: `memory_budget_gb`, if blocks are computed again: what the device leaves, or what it takes if that is
            more.
        host_bytes: Host memory of a rank.
    """

    choice: Choice
    step_us: float
    tokens_per_s: float
    mfu: float
    memory: Mapping[Part, float]
    recomputed: int
    blocks: int
    budget_gb: float | None
    host_bytes: float

    @property
    def peak_bytes(self) -> float:
        """All parts together."""
        return sum(self.memory.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; units are in the names."""
        numbers = {name: getattr(self, name) for name in ("step_us", "tokens_per_s", "mfu", "recomputed", "blocks")}
        memory = {part.value: size for part, size in self.memory.items()}
        more = {"budget_gb": self.budget_gb, "host_bytes": self.host_bytes, "peak_bytes": self.peak_bytes}
        return {**self.choice.to_dict(), **numbers, **more, "memory_bytes": memory}


@dataclasses.dataclass(frozen=True)
class Ask:
    """What is searched for.

    Attributes:
        gpus: Ranks of the world.
        hardware: Of all of them.
        memory_bytes: Of one device.
        reserve_bytes: Of that, for what no estimate sees: the context of the device, buffers of its libraries, gaps.
        tokens_per_step: Of all ranks.
        tokens_per_sample: Of the model's inputs.
        optimizer: One of `OPTIMIZERS`.
        allow: What is searched only if it is named here.
        looks_up: Whether rows of tables are looked up on the ranks that have them (`embedding="sharded"`).
    """

    gpus: int
    hardware: Hardware
    memory_bytes: float
    reserve_bytes: float
    tokens_per_step: int
    tokens_per_sample: int
    optimizer: str
    allow: tuple[Allowed, ...]
    looks_up: bool = False

    @property
    def samples(self) -> int:
        """Samples of one rank in a step."""
        return self.tokens_per_step // (self.gpus * self.tokens_per_sample)

    @property
    def states(self) -> int:
        """Numbers of the optimizer for each parameter."""
        return OPTIMIZERS[self.optimizer].states

    def least(self) -> list[Choice]:
        """Choices of which one takes the least memory: of each form, with one micro-batch and with the smallest."""

        def needs(choice: Choice) -> tuple[bool, int, int]:
            return choice.offload is Offload.NOTHING, -choice.shards, choice.micro_batch

        found = []
        for form in Form:
            every = [c for c in self.choices() if c.form is form and RESHARDS[c.reshard] is True and not c.kept_share]
            one = [choice for choice in every if choice.accumulation == 1]  # it holds no gradients of earlier ones
            found += [min(of, key=needs) for of in (every, one)]
        return list(dict.fromkeys(found))

    def choices(self) -> Iterator[Choice]:
        """Every way to shard and run a model, on whole hosts or equal parts of a host."""
        local = self.hardware.local_size
        shards = [n for n in _divisors(self.gpus) if n == self.gpus or n % local == 0 or local % n == 0]
        offloads = Offload if Allowed.CPU_OFFLOAD in self.allow else (Offload.NOTHING,)
        formats = ("", GATHERED_IN.name) if Allowed.INT8_GATHERS in self.allow else ("",)
        kinds = [*itertools.product(_divisors(self.samples), Form, offloads, formats)]
        for ranks in [n for n in shards if n > 1] or [1]:
            reshards = [(reshard, 1) for reshard in (RESHARDS if ranks > 1 else (Reshard.AFTER_FORWARD,))]
            # Gathered parameters may be kept for backward by some ranks of a host together.
            parts = [n for n in _divisors(local) if 1 < n < ranks and ranks % n == 0]
            reshards += [(Reshard.AFTER_FORWARD, n) for n in parts]
            for (reshard, part), kind in itertools.product(reshards, kinds):
                micro_batch, form, offload, sent = kind
                counts = (micro_batch, self.samples // micro_batch)
                choice = Choice(ranks, self.gpus // ranks, reshard, *counts, form, offload, part, sent)
                if self._can_run(choice):
                    yield choice

    def _can_run(self, choice: Choice) -> bool:
        """Whether a compile takes a choice."""
        if choice.gather_format and choice.shards == 1:
            return False
        # Rows that are looked up where they are come as they are stored.
        is_plain = choice.post_forward == 1 and not choice.gather_format and choice.offload is Offload.NOTHING
        if self.looks_up and not is_plain:
            return False
        # Graphs of blocks choose by themselves in a step, as no plan of one graph does; and what is in no block is
        # gathered by FSDP2, which knows no formats.
        return choice.form is Form.WHOLE or not (choice.reshard is Reshard.AUTO or choice.gather_format)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
