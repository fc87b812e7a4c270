"""The search: the best ways to run a model by estimate, priced in the order of what they can reach at best."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from fsdp_compile.cost.hardware import DEVICES, share_of_others
from fsdp_compile.errors import ConfigError
from fsdp_compile.explain.api import as_blocks, traced_model
from fsdp_compile.explain.open_batch import hollow_inputs
from fsdp_compile.explain.rescale import Traced
from fsdp_compile.explain.stand_in import planning_world
from fsdp_compile.layout.hosts import GroupRanks
from fsdp_compile.layout.spec import Reshard
from fsdp_compile.options import FSDPOptions
from fsdp_compile.search.choice import GATHERED_IN, PART_OF, Ask, Choice, Configuration, Form, Offload, Part
from fsdp_compile.search.price import (
    DEPTHS,
    FullBytes,
    Price,
    Stack,
    computing_us,
    full_bytes,
    price,
    shortened,
    stack_of,
)

SHOWN: Final = 5
"""Configurations that are shown."""
TOLERANCE: Final = 0.01
"""The search ends where nothing that is left can be faster than the shown ones by more than this share."""
_ALL: Final = 1_000_000


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, and what its forward is called with."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    options: FSDPOptions

    def with_batch(self, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the forward on meta, with so many samples."""

        def resized(tensor: torch.Tensor) -> torch.Tensor:
            shape = (size, *tensor.shape[1:]) if tensor.dim() else ()
            return torch.empty(shape, dtype=tensor.dtype, device="meta")

        made: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
            torch.Tensor, resized, (self.args, dict(self.kwargs))
        )
        return made


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        best: That keep the memory, the fastest first.
        smallest: That takes the least memory.
        priced: How many were priced.
        stack: Like blocks of which few were traced.
    """

    best: tuple[Configuration, ...]
    smallest: Configuration
    priced: int
    stack: Stack | None


class Search:
    """Prices of one model; graphs are traced once for each number of blocks and each kind of recomputation."""

    def __init__(self, program: Program, ask: Ask) -> None:
        self.program = program
        self.ask = ask
        self.stack = stack_of(program.model)
        self.depths: Sequence[int | None] = (None,) if self.stack is None else DEPTHS
        self._is_open = ask.samples > 1
        self._traced = functools.cache(self._trace)
        self._computing_us = functools.cache(self._compute)
        self.configuration = functools.cache(self._configuration)

    def elsewhere(self, ask: Ask) -> Search:
        """The search for another number of devices or other memory, with the graphs that are traced for this one."""
        made = Search(self.program, ask)
        if (ask.gpus == 1) == (self.ask.gpus == 1):  # one rank has other graphs than several
            made._traced, made._is_open = self._traced, self._is_open
        return made

    def run(self) -> Found:
        """Prices choices, those that can be fastest first, until the shown ones are proven."""
        done: list[Configuration] = []
        too_large: list[Configuration] = []
        with planning_world(self.ask.gpus):
            smallest = self.smallest()
            if smallest.peak_bytes > self.ask.memory_bytes:
                return Found((), smallest, len(self.ask.least()), self.stack)
            open_ = [c for c in self.ask.choices() if self._held_at_least(c) <= self.ask.memory_bytes]
            queue = [(*self._at_best(choice, 0.0), number, choice) for number, choice in enumerate(open_)]
            heapq.heapify(queue)
            while queue:
                bound_us, sent_us, number, choice = heapq.heappop(queue)
                if len(done) >= SHOWN and sorted(c.step_us for c in done)[SHOWN - 1] <= bound_us * (1 + TOLERANCE):
                    break
                if any(choice.needs_at_least(other.choice) for other in too_large):
                    continue
                sharper_us, _ = self._at_best(choice, self._share_again(choice))
                if sharper_us > bound_us:
                    heapq.heappush(queue, (sharper_us, sent_us, number, choice))
                    continue
                made = self.configuration(choice)
                (done if made.peak_bytes <= self.ask.memory_bytes else too_large).append(made)
        done.sort(key=lambda c: c.step_us)
        return Found(tuple(done[:SHOWN]), smallest, len(done) + len(too_large), self.stack)

    def smallest(self) -> Configuration:
        """The configuration that takes the least memory, inside of `planning_world`."""
        return min(map(self.configuration, self.ask.least()), key=lambda made: made.peak_bytes)

    def _configuration(self, choice: Choice) -> Configuration:
        """The estimates for a choice, with as few blocks computed again as the memory takes."""
        saved = self._price(choice, 0)
        beside = self._beside(choice, saved)
        room = self.ask.memory_bytes - sum(beside.values())
        again, spent = 0, saved
        may_recompute = self.program.options.prefetch == self.program.options.activations == "auto"
        blocks = self._blocks if saved.peak_bytes > room and choice.form is Form.WHOLE and may_recompute else 0
        if blocks:
            least = self._price(choice, _ALL)
            spared = saved.peak_bytes - least.peak_bytes
            wanted = math.ceil((saved.peak_bytes - room) / spared * blocks) if spared > 0 else 0
            again = min(max(wanted, 0), blocks)
            spent = _mixed(saved, least, again / blocks)
        memory = {**dict.fromkeys(Part, 0.0), **beside}
        for holder, size in spent.at_peak.items():
            memory[PART_OF[holder]] += size
        # The optimizer reads parameter, gradient and state, and writes parameter and state.
        updating = self.ask.hardware.device if choice.offload is Offload.NOTHING else DEVICES["cpu"]
        update_us = (3 + 2 * self.ask.states) * spent.trained_bytes * 1e6 / updating.bytes_per_s
        step_us = choice.accumulation * spent.time_us + update_us
        flops = choice.accumulation * saved.flops
        # Of the data sheet, also where a rate was measured; a CPU's is assumed, and may be less than it reached.
        there = self.ask.hardware
        peak = max(device.matmul_peak(self._dtype).value for device in (there.data_sheet, there.device))
        return Configuration(
            choice,
            step_us=step_us,
            tokens_per_s=self.ask.tokens_per_step / step_us * 1e6,
            mfu=flops / (step_us * 1e-6) / peak,
            memory=memory,
            recomputed=again,
            blocks=blocks,
            budget_gb=math.floor(max(room, spent.peak_bytes) / 1e3) / 1e6 if again else None,
            host_bytes=spent.host_bytes + (self.ask.states * spent.trained_bytes if spent.host_bytes else 0),
        )

    @property
    def _dtype(self) -> Any:
        """The dtype in which most is computed."""
        params = [param for unit in self._traced(self.depths[0], 0).units for param in unit.params]
        return max(params, key=lambda param: param.spec.numel).spec.param_dtype

    @property
    def _blocks(self) -> int:
        """Blocks that can be computed again."""
        traced = self._traced(self.depths[-1], _ALL)
        missing = 0 if self.stack is None else self.stack.blocks - DEPTHS[-1]
        found = sum(region.recomputed for region in traced.regions)
        return found + missing if found else 0

    def _beside(self, choice: Choice, spent: Price) -> dict[Part, float]:
        """Memory of a device beside its graphs: gradients of earlier micro-batches, optimizer state, the reserve."""
        held = {Part.RESERVE: self.ask.reserve_bytes}
        if choice.offload is Offload.NOTHING:
            held[Part.OPTIMIZER] = self.ask.states * spent.trained_bytes
            held[Part.GRADIENTS] = spent.trained_bytes if choice.accumulation > 1 else 0.0
        return held

    def _share_again(self, choice: Choice) -> float:
        """The share of blocks that a micro-batch computes again where each rank holds the least parameters."""
        if choice.form is Form.BLOCKS:
            return 0.0
        shards = max(each.shards for each in self.ask.choices())
        replicas = self.ask.gpus // shards
        made = self.configuration(
            dataclasses.replace(choice, shards=shards, replicas=replicas, reshard=Reshard.AFTER_FORWARD, post_forward=1)
        )
        return made.recomputed / made.blocks if made.blocks else 0.0

    def _held_at_least(self, choice: Choice) -> float:
        """Bytes that no schedule of a choice goes below: shards, gradients, optimizer state, and all that is kept."""
        shards = (self._full.stored + (1 + self.ask.states) * self._full.trained) / choice.shards
        kept = self._full.again * choice.kept_share
        return self.ask.reserve_bytes + kept + (shards if choice.offload is Offload.NOTHING else 0.0)

    def _at_best(self, choice: Choice, again: float) -> tuple[float, float]:
        """A time that a choice cannot beat if it computes a share of the blocks again, and that of its messages."""
        full, there = self._full, self.ask.hardware
        share = min(1.0, GATHERED_IN.element_bytes / self._dtype.itemsize) if choice.gather_format else 1.0
        # Backward gathers over the ranks that keep the parts, in the dtype of computing.
        twice = choice.reshard is Reshard.AFTER_FORWARD and choice.post_forward == 1
        messages = (
            (GroupRanks(choice.shards), share * (full.gathered + twice * full.again) + full.reduced),
            (GroupRanks(choice.post_forward), full.again),
            (GroupRanks(choice.replicas, choice.shards), 2 * full.reduced / choice.shards),
        )
        times: dict[str, float] = {}
        for group, size in messages:
            if group.size > 1:
                us = size * share_of_others(group.size) * 1e6 / there.bytes_per_s(group)
                link = there.link_of(group).name
                times[link] = times.get(link, 0.0) + us
        sent_us = max(times.values(), default=0.0)
        computing_us = self._computing_us(choice.micro_batch, 0)
        if again:
            computing_us += again * (self._computing_us(choice.micro_batch, _ALL) - computing_us)
        return choice.accumulation * max(computing_us, sent_us), sent_us

    @functools.cached_property
    def _full(self) -> FullBytes:
        made = [full_bytes(self._traced(depth, 0)) for depth in self.depths]
        return made[0] if self.stack is None else FullBytes(*map(self.stack.grow, *map(dataclasses.astuple, made)))

    def _compute(self, micro_batch: int, recomputed: int) -> float:
        there, batch = self.ask.hardware, self._batch(micro_batch)
        made = [computing_us(self._traced(depth, recomputed), batch, there) for depth in self.depths]
        return made[0] if self.stack is None else self.stack.grow(*made)

    def _trace(self, depth: int | None, recomputed: int) -> Traced:
        """Graphs of the model with so many blocks; the size of a batch is open if the search has several of them."""
        of = self.program
        model = of.model if depth is None or self.stack is None else shortened(of.model, self.stack, depth)
        args, kwargs = (of.args, of.kwargs) if self._is_open else of.with_batch(1)
        options = dataclasses.replace(of.options, reshard_after_forward="auto")
        inputs = hollow_inputs(args, kwargs, open_batch=self._is_open)
        return traced_model(model, inputs, self.ask.gpus, options, recomputed)

    def _batch(self, micro_batch: int) -> int | None:
        """Of open graphs; `None` where a rank has one sample, since graphs with numbers are traced faster."""
        return micro_batch if self._is_open else None

    def _price(self, choice: Choice, recomputed: int) -> Price:
        batch, there, made = self._batch(choice.micro_batch), self.ask.hardware, []
        for depth in self.depths:
            traced = self._traced(depth, recomputed)
            options = as_blocks(traced.options) if choice.form is Form.BLOCKS else traced.options
            stack = None if self.stack is None or depth is None else (self.stack, depth)
            made.append(price(traced, choice.sharding, batch, there, options, stack))
        return made[0] if self.stack is None else self.stack.price(*made, kept_share=choice.kept_share)


def _mixed(saved: Price, again: Price, share: float) -> Price:
    """The price with a share of the blocks computed again: each of them spares and costs the same."""

    def mixed(a: float, b: float) -> float:
        return a + (b - a) * share

    names = [field.name for field in dataclasses.fields(Price) if field.name != "memory"]
    before, after = saved.at_peak, again.at_peak
    held = {holder: mixed(before.get(holder, 0), after.get(holder, 0)) for holder in dict.fromkeys((*before, *after))}
    segment = next(iter(saved.memory))
    return Price(memory={segment: held}, **{name: mixed(getattr(saved, name), getattr(again, name)) for name in names})


def samples_of(tokens_per_step: int, gpus: int, tokens_per_sample: int) -> int:
    """Samples of one rank in a step; raises `ConfigError` if they are not a whole number."""
    each = gpus * tokens_per_sample
    if tokens_per_step < each or tokens_per_step % each:
        near = max(1, round(tokens_per_step / each)) * each
        raise ConfigError(
            f"{tokens_per_step} tokens in a step are not the same number of samples of {tokens_per_sample} tokens on "
            f"each of {gpus} ranks",
            where=f"plan(tokens_per_step={tokens_per_step})",
            instead=f"{near}",
        )
    return tokens_per_step // each
