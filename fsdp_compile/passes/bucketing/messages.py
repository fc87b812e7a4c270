"""Messages and buckets: parameters as pieces, and pieces as buckets.

Small parameters that are neighbours in a flat parameter are one piece, sent as one packed message; every large one is a
piece of its own, gathered into contiguous memory. A bucket of several units packs the small parameters of all of them
into one piece.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Sequence
from operator import getitem

from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile._torch.tensors import OpOverload
from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import Record, Role, require
from fsdp_compile.layout.flat_layout import LARGE_BYTES
from fsdp_compile.layout.hosts import GroupRanks
from fsdp_compile.layout.spec import UnshardSpec


@dataclasses.dataclass(frozen=True)
class ParamCollective:
    """One parameter's collectives, as insert-collectives left them."""

    start: fx.Node  # starts the first one
    flat: fx.Node  # the flat parameter of the parameter or gradient; or the post-forward shard that is gathered
    end: fx.Node  # the full parameter, or the reduced shard

    @property
    def spec(self) -> UnshardSpec:
        """The parameter's place."""
        return require(self.start).specs[0]

    @property
    def is_post_forward(self) -> bool:
        """Whether post-forward shards are gathered."""
        return require(self.flat).role is Role.POST_FORWARD_SHARD

    @property
    def ranks(self) -> GroupRanks:
        """Ranks that the collective runs over."""
        return self.spec.post_forward_ranks if self.is_post_forward else self.spec.shard_ranks

    @property
    def extent(self) -> int:
        """Elements that each rank has of it."""
        return self.spec.post_forward_numel if self.is_post_forward else self.spec.extent

    @property
    def full_bytes(self) -> int:
        """Bytes of the messages of all ranks."""
        values = [message.meta["val"] for message in self.start.all_input_nodes]
        times = self.ranks.size if require(self.start).role is Role.GATHER else 1
        return times * sum(value.numel() * value.element_size() for value in values)

    @property
    def sent(self) -> fx.Node:
        """The message that is sent; of a quantized parameter, the one with its elements."""
        return self.start.all_input_nodes[0]


@dataclasses.dataclass(frozen=True)
class Message:
    """Slots that are sent as one message: one run of neighbours in a flat parameter, or several one after the other."""

    singles: tuple[ParamCollective, ...]

    @functools.cached_property
    def adjacent(self) -> tuple[Message, ...]:
        """Its runs of neighbours in one flat parameter, in their order."""
        runs: list[list[ParamCollective]] = []
        for single in self.singles:
            if runs and _adjacent(runs[-1][-1], single):
                runs[-1].append(single)
            else:
                runs.append([single])
        return (self,) if len(runs) == 1 else tuple(Message(tuple(run)) for run in runs)

    @property
    def flat(self) -> fx.Node:
        """The flat parameter that the slots of a single run lie in."""
        return self.singles[0].flat

    @property
    def begin(self) -> int:
        """First element of a single run in its flat parameter."""
        return self.singles[0].spec.offset

    @functools.cached_property
    def span(self) -> int:
        """Elements per rank."""
        return sum(single.spec.extent for single in self.singles)

    @functools.cached_property
    def starts(self) -> dict[ParamCollective, int]:
        """Where in each rank's span each slot starts."""
        places = itertools.accumulate((single.spec.extent for single in self.singles), initial=0)
        return dict(zip(self.singles, places, strict=False))

    def record(self, role: Role) -> Record:
        """The record of a node that serves the whole piece."""
        return joint_record(self.singles, role)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Pieces that share their collectives, in the order of the messages."""

    pieces: tuple[Message, ...]

    @property
    def singles(self) -> tuple[ParamCollective, ...]:
        """All parameters of the bucket."""
        return tuple(single for piece in self.pieces for single in piece.singles)

    @property
    def spec(self) -> UnshardSpec:
        """The first parameter's place; group, sizes and dtypes are those of the whole bucket."""
        return self.pieces[0].singles[0].spec


def by_unit(singles: Iterable[ParamCollective]) -> list[list[ParamCollective]]:
    """Parameters that can share a collective and belong to one unit, in the order of the first of each."""
    groups: dict[Hashable, list[ParamCollective]] = {}
    for single in singles:
        groups.setdefault((require(single.start).unit, collective_of(single)), []).append(single)
    return list(groups.values())


def collective_of(single: ParamCollective) -> Hashable:
    """Equal for parameters that one collective can serve."""
    spec = single.spec
    over = (single.start.args[-1], spec.group, spec.replicate_group)
    return over, single.sent.meta["val"].dtype, spec.grad_placement, spec.divide


def by_offset(singles: Sequence[ParamCollective]) -> list[ParamCollective]:
    """Parameters flat parameter by flat parameter, by offset: neighbours come one after the other."""
    places = {flat: place for place, flat in enumerate(dict.fromkeys(single.flat for single in singles))}
    return sorted(singles, key=lambda s: (places[s.flat], s.spec.offset))


def make_bucket(singles: Sequence[ParamCollective], *, packs_large: bool = False) -> Bucket:
    """The parameters, in the order of their messages, as one bucket; of several units, all small ones are one piece."""
    if len({require(single.start).unit for single in singles}) > 1:
        small = tuple(filter(is_small, singles))
        large = [Message((single,)) for single in singles if not is_small(single)]
        return Bucket((*[Message(small)] * bool(small), *large))
    pieces: list[list[ParamCollective]] = []
    for single in singles:
        last = pieces[-1][-1] if pieces else None
        joins = packs_large or (is_small(single) and last is not None and is_small(last))
        if last is not None and joins and _adjacent(last, single):
            pieces[-1].append(single)
        else:
            pieces.append([single])
    return Bucket(tuple(Message(tuple(piece)) for piece in pieces))


def is_small(single: ParamCollective) -> bool:
    """Whether a parameter is packed with its neighbours."""
    return single.spec.shard_numel * single.flat.meta["val"].element_size() < LARGE_BYTES


def _adjacent(one: ParamCollective, other: ParamCollective) -> bool:
    return one.flat is other.flat and one.spec.offset + one.spec.extent == other.spec.offset


def joint_record(singles: Sequence[ParamCollective], role: Role) -> Record:
    """The record of a node that serves several parameters."""
    records = [require(single.start) for single in singles]
    names = tuple(name for record in records for name in record.parameters)
    units = tuple(record.unit for record in records)
    specs = tuple(single.spec for single in singles)
    return Record(role, units[0], names, specs, records[0].phase, units if len(set(units)) > 1 else ())


def start_grouped(
    b: GraphBuilder, op: OpOverload, args: tuple[object, ...], pieces: Sequence[Message], roles: tuple[Role, Role, Role]
) -> list[fx.Node]:
    """Records a grouped collective, its items and a wait for each; returns the waits.

    `args` begin with the list of messages, and `pieces` has the piece of each; a piece may take two messages. `roles`
    are those of the start, of the items, of the waits.
    """
    start_role, item_role, wait_role = roles
    b.record = joint_record([s for piece in dict.fromkeys(pieces) for s in piece.singles], start_role)
    started = b.call(op, *args)
    items = []
    for index, piece in enumerate(pieces):
        b.record = piece.record(item_role)
        items.append(b.call(getitem, started, index))
    waits = []
    for item, piece in zip(items, pieces, strict=True):
        b.record = piece.record(wait_role)
        waits.append(b.call(collectives.wait_tensor.default, item))
    return waits
